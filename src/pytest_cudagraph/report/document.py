"""The run as a document (``--cudagraph-json``, schema 1), written and read back. Times in seconds, memory in bytes.

What a reader can compute is written for programs (verdicts, words, attainable speedups), and is not read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pytest_cudagraph.baseline import latency_change
from pytest_cudagraph.foreign import without_credentials
from pytest_cudagraph.report.codec import from_plain, items, located, seconds, to_plain
from pytest_cudagraph.report.workloads import WorkloadTest
from pytest_cudagraph.values import (
    Addition,
    BatchReport,
    DeviceInfo,
    Finding,
    GraphReport,
    Interval,
    LatencyChange,
    Receipt,
    SavedBatch,
    Scenario,
    Table,
    Timing,
    Verdict,
)

SCHEMA = 1

_ARMS = ("eager", "compiled", "replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its document has it."""

    reports: tuple[GraphReport, ...] = ()
    device: DeviceInfo | None = None
    """Of the first report that has one."""
    date: str | None = None
    commit: Mapping[str, Any] | None = None
    rootdir: str = ""
    """Paths of findings are shown below it."""
    workloads: tuple[WorkloadTest, ...] = ()
    tables: tuple[Table, ...] = ()


def document(
    reports: Iterable[GraphReport],
    device: DeviceInfo | None,
    settings: Any,
    additions: Iterable[Addition] = (),
    workloads: Iterable[WorkloadTest] = (),
    *,
    tables: Iterable[Table] = (),
    date: str | None = None,
    commit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything of a run, also of its failing tests; ``settings`` is a mapping or a dataclass. No number is infinite.

    ``date`` is an ISO date and time, ``commit`` the facts of :func:`pytest_cudagraph.environment.commit`.
    """
    parts = {
        "schema": SCHEMA,
        "date": date,
        "commit": commit,
        "device": device,
        "settings": without_secrets(settings),
        "tests": [_test(report) for report in reports],
        "workloads": list(workloads),
        "tables": list(tables),
        **_added(additions),
    }
    return {key: to_plain(part, public=True) for key, part in parts.items()}


def _added(additions: Iterable[Addition]) -> dict[str, list[dict[str, Any]]]:
    """The entries of features by key. A feature that added nothing has no key."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for addition in additions:
        lists.setdefault(addition.key, []).append({"nodeid": addition.nodeid, **addition.entry})
    return lists


def without_secrets(settings: Any) -> dict[str, Any]:
    """The settings of a run by name. A baseline may be a URL with a password in it."""
    shown = dict(settings) if isinstance(settings, Mapping) else asdict(settings)
    return shown | ({"baseline": without_credentials(str(shown["baseline"]))} if "baseline" in shown else {})


def json_text(plain: Mapping[str, Any]) -> str:
    """The document as text."""
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def run_of_document(plain: Any) -> Run:
    """The run that a document tells of. Raises :class:`ValueError` for what is none of schema 1, and a damaged one."""
    if type(plain) is not dict or type(plain.get("schema")) is not int or plain["schema"] != SCHEMA:
        raise ValueError(f"not a document of schema {SCHEMA} as --cudagraph-json writes it")
    try:
        settings = _read("settings", plain, Mapping[str, Any])
        return Run(
            reports=located("tests", lambda each: items(each, _report_of), plain["tests"]),
            device=_read("device", plain, DeviceInfo | None),
            date=_read("date", plain, str | None),
            commit=_read("commit", plain, Mapping[str, Any] | None),
            rootdir=str(settings.get("rootdir") or ""),
            workloads=_read("workloads", plain, tuple[WorkloadTest, ...]),
            tables=_read("tables", plain, tuple[Table, ...]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"damaged: {reason}") from error


def _read(key: str, plain: Mapping[str, Any], hint: object) -> Any:
    return located(key, lambda each: from_plain(hint, each, public=True), plain[key])


def _test(report: GraphReport) -> dict[str, Any]:
    return {
        "nodeid": report.nodeid,
        "name": report.name,
        "verdict": report.verdict,
        "device": report.device,
        "gpu": report.gpu or None,
        "compile_mode": report.compile_mode,
        "compile_seconds": seconds(report.compile_ns),
        "findings": [_finding(finding) for finding in report.findings],
        "judgements": report.judgements,
        "not_judged": report.not_judged,
        "notes": report.notes,
        "batches": [_batch(report, batch) for batch in report.batches],
    }


def _report_of(plain: Mapping[str, Any]) -> GraphReport:
    report = from_plain(GraphReport, {**plain, "gpu": plain["gpu"] or "", "findings": [], "batches": []}, public=True)
    findings = located("findings", lambda each: items(each, _finding_of), plain["findings"])
    batches = located(
        "batches", lambda each: items(each, lambda batch: _batch_of(batch, report.name)), plain["batches"]
    )
    return replace(report, findings=findings, batches=batches)


def _finding(finding: Finding) -> dict[str, Any]:
    """The line of the finding stands beside its other facts."""
    site = finding.site
    place = {"file": None, "line": None, "function": None} if site is None else asdict(site)
    rest = to_plain(finding)
    del rest["site"]
    return {**rest, **place, "accepted": finding.accepted or None}


def _finding_of(plain: Mapping[str, Any]) -> Finding:
    site = None if plain["file"] is None else {key: plain[key] for key in ("file", "line", "function")}
    return from_plain(Finding, {**plain, "site": site, "accepted": plain["accepted"] or ""})


def _batch(report: GraphReport, batch: BatchReport) -> dict[str, Any]:
    receipt = batch.receipt
    return {
        "batch_size": batch.batch_size,
        "verdict": batch.verdict,
        "word": batch.word,
        "reason": batch.worst.reason if batch.worst else None,
        "judgements": batch.judgements,
        "min_speedup": batch.min_speedup,
        "compile_seconds": seconds(batch.compile_ns),
        **_timing(batch.valid_timing, batch.speedup),
        "kernels": receipt.kernels if receipt else None,
        "capture_seconds": seconds(receipt.capture_ns) if receipt else None,
        "memory_bytes": receipt.memory_bytes if receipt else None,
        "receipt": _receipt(batch),
        "check": batch.agreement,
        "comparison": batch.comparison,
        "baseline": _baseline(report, batch),
        "base": batch.base,
        "figures": batch.figures,
        "scenario": None if batch.scenario is None else _scenario(batch.scenario, report.name),
    }


def _batch_of(plain: Mapping[str, Any], test: str) -> BatchReport:
    timing, saved, scenario = _timing_of(plain), plain["baseline"], plain["scenario"]
    same = ("batch_size", "judgements", "min_speedup", "compile_seconds", "comparison", "base", "figures")
    parts = {
        **{key: plain[key] for key in same},
        "timing": timing,
        "speedup": None if timing else plain["speedup"],
        "receipt": _receipt_of(plain),
        "agreement": plain["check"],
        "baseline": saved and {**saved, "name": test, "batch_size": plain["batch_size"]},
        "scenario": scenario and {**{f"stored_{key}": scenario[key] for key in ("properties", "tables")},
                                  "stored_document": scenario["result"], **scenario},
    }  # fmt: skip
    batch = from_plain(BatchReport, parts, public=True)
    if batch.batch_size < 1:
        raise ValueError(f"batch_size: at least 1 is needed, not {batch.batch_size}")
    return batch


_TIMING = tuple(f"{each.name.removesuffix('_ns')}_seconds" if each.name.endswith("_ns") else each.name
                for each in fields(Timing) if each.name != "medians")  # fmt: skip


def _timing(timing: Timing | None, own_speedup: Interval | None) -> dict[str, Any]:
    """The keys of a batch size that one measurement fills. All are None without one."""
    if timing is None:
        return {**dict.fromkeys(_TIMING), "speedup": own_speedup, "attainable_speedup": None}
    plain = to_plain(timing, public=True)
    for arm, judged in plain.pop("medians").items():
        plain[arm] = None if plain[arm] is None else {**plain[arm], "judged": judged}
    ratio = timing.attainable_ratio
    return {**plain, "attainable_speedup": None if ratio is None else round(ratio, 6)}


def _timing_of(plain: Mapping[str, Any]) -> dict[str, Any] | None:
    if plain["replay"] is None:
        return None
    medians = {arm: plain[arm]["judged"] for arm in _ARMS if plain[arm] is not None}
    return {**{key: plain[key] for key in _TIMING}, "medians": medians}


def _receipt(batch: BatchReport) -> dict[str, Any]:
    """The graph of this batch size, its launches, and why calls did not use it."""
    receipt = batch.receipt or Receipt(batch_size=batch.batch_size, operations=None, kernels=None)
    refusals = [each.reason for each in batch.judgements if each.verdict is Verdict.NOT_CAPTURED]
    return {
        "operations": receipt.operations,
        "nodes": receipt.kernels,
        "kernel_names": receipt.kernel_names,
        "not_counted": receipt.not_counted,
        "opaque_regions": receipt.opaque_regions if batch.receipt else None,
        "replays": receipt.replays,
        "fallbacks": [*refusals, *receipt.fallbacks],
    }


def _receipt_of(plain: Mapping[str, Any]) -> dict[str, Any] | None:
    if plain["capture_seconds"] is None:
        return None
    refusals = sum(each["verdict"] == Verdict.NOT_CAPTURED.value for each in plain["judgements"])
    facts = {key: plain[key] for key in ("batch_size", "kernels", "memory_bytes", "capture_seconds")}
    return {**plain["receipt"], **facts, "fallbacks": plain["receipt"]["fallbacks"][refusals:]}


def _baseline(report: GraphReport, batch: BatchReport) -> dict[str, Any] | None:
    """The saved entry, its sessions, and where a session of unchanged code would lie today."""
    if not isinstance(batch.baseline, SavedBatch):
        return None
    plain = to_plain(batch.baseline, public=True)
    del plain["name"], plain["batch_size"]
    change = change_since_saved(report, batch)
    if change is None:
        return {**plain, "unchanged": None}
    low, high = map(seconds, change.unchanged_ns)
    is_divided = change.reference_ns is not None
    return {**plain, "unchanged": {"statistic": change.what, "low": low, "high": high, "divided": is_divided}}


def change_since_saved(report: GraphReport, batch: BatchReport) -> LatencyChange | None:
    """The replay compared with the saved sessions of the same hardware. None without any, or without a valid timing."""
    timing = batch.valid_timing
    if timing is None or report.device is None or batch.baseline is None:
        return None
    return latency_change(batch.baseline, timing, report.device)


def _scenario(scenario: Scenario, test: str) -> dict[str, Any]:
    return {
        "kind": scenario.kind,
        "has_entry": scenario.has_entry,
        "properties": scenario.properties(),
        "tables": scenario.tables(test),
        "result": scenario.document(),
    }

"""The run as a document (``--cudagraph-json``, schema 1) and as JUnit properties. Times in seconds, memory in bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from pytest_cudagraph.baseline import normal_name
from pytest_cudagraph.foreign import printable, without_credentials
from pytest_cudagraph.report.document_timings import base_fields, baseline_fields, seconds, timing_fields
from pytest_cudagraph.report.run_tables import tables as tables_of_scenarios
from pytest_cudagraph.report.table import UNTIMED
from pytest_cudagraph.units import to_seconds
from pytest_cudagraph.values import (
    Addition,
    Agreement,
    BatchReport,
    DeviceInfo,
    Finding,
    GraphReport,
    Interval,
    Judgement,
    Scenario,
    Table,
    Timing,
    Verdict,
)

SCHEMA = 1


def document(
    reports: Iterable[GraphReport],
    device: DeviceInfo | None,
    settings: Any,
    additions: Iterable[Addition] = (),
    workloads: Iterable[Mapping[str, Any]] = (),
    *,
    tables: Iterable[Table] = (),
    date: str | None = None,
    commit: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything of a run, also of its failing tests; ``settings`` is a mapping or a dataclass. No number is infinite.

    ``date`` is an ISO date and time, ``commit`` the facts of :func:`pytest_cudagraph.environment.commit`.
    """
    reports = list(reports)
    found = {
        "schema": SCHEMA,
        "date": date,
        "commit": None if commit is None else dict(commit),
        "device": None if device is None else asdict(device),
        "settings": _without_credentials(settings if isinstance(settings, Mapping) else asdict(settings)),
        "tests": [_test(report) for report in reports],
        "workloads": list(workloads),
        "tables": [asdict(table) for table in (*tables_of_scenarios(reports), *tables)],
        **_added(additions),
    }
    return {key: _jsonable(value) for key, value in found.items()}


def _added(additions: Iterable[Addition]) -> dict[str, list[dict[str, Any]]]:
    """The entries of features by key. A feature that added nothing has no key."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for addition in additions:
        lists.setdefault(addition.key, []).append({"nodeid": addition.nodeid, **addition.entry})
    return lists


def _without_credentials(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A baseline may be a URL with a password in it."""
    shown = {"baseline": without_credentials(str(settings["baseline"]))} if "baseline" in settings else {}
    return {**settings, **shown}


def json_text(found: Mapping[str, Any]) -> str:
    """The document as text."""
    return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def properties(report: GraphReport) -> list[tuple[str, str]]:
    """JUnit's properties of a test: ``cudagraph.batch_8.speedup`` = ``1.42``. A custom name is part of the key."""
    is_plain = report.name == normal_name(report.nodeid)
    prefix = "cudagraph" if is_plain else f"cudagraph.{printable(report.name)}"
    found = [(f"{prefix}.verdict", report.verdict.value)]
    for batch in report.batches:
        found += [(f"{prefix}.batch_{batch.batch_size}.{key}", text) for key, text in _properties(batch)]
    return found


def _properties(batch: BatchReport) -> list[tuple[str, str]]:
    found = [("verdict", batch.verdict.value)]
    timing = _timing(batch)
    if timing is not None:
        found += [(f"speedup{suffix}", f"{value:.2f}") for suffix, value in _bounds(timing.speedup)]
        found += [("eager_seconds", f"{to_seconds(timing.medians.eager_ns):.4g}")]
        found += [("replay_seconds", f"{to_seconds(timing.medians.replay_ns):.4g}")]
    found += [] if batch.scenario is None else batch.scenario.properties().items()
    if batch.receipt is not None and batch.receipt.kernels is not None:
        found.append(("kernels", str(batch.receipt.kernels)))
    return found


def _bounds(speedup: Interval) -> list[tuple[str, float]]:
    return [("", speedup.estimate), ("_low", speedup.low), ("_high", speedup.high)]


def _test(report: GraphReport) -> dict[str, Any]:
    return {
        "nodeid": report.nodeid,
        "name": report.name,
        "verdict": report.verdict.value,
        "gpu": report.gpu or None,
        "compile_mode": report.compile_mode,
        "compile_seconds": None if report.compile_ns is None else seconds(report.compile_ns),
        "findings": [_finding(finding) for finding in report.findings],
        "judgements": [_judgement(judgement) for judgement in report.judgements],
        "not_judged": list(report.not_judged),
        "notes": list(report.notes),
        "batches": [_batch(batch, report.device, report.name) for batch in report.batches],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    caller = finding.called_from
    return {
        "id": finding.id,
        "level": finding.level,
        "file": finding.site.file if finding.site else None,
        "line": finding.site.line if finding.site else None,
        "function": finding.site.function if finding.site else None,
        "called_from": {"file": caller.file, "line": caller.line} if caller else None,
        "message": finding.message,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "accepted": finding.accepted or None,
    }


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {
        "gate": judgement.gate,
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "evidence": list(judgement.evidence),
        "remedy": judgement.remedy,
        "hazard": judgement.hazard or None,
    }


def _scenario(scenario: Scenario | None, test: str) -> dict[str, Any] | None:
    if scenario is None:
        return None
    return {
        "kind": scenario.kind,
        "has_entry": scenario.has_entry,
        "properties": dict(scenario.properties()),
        "tables": [asdict(each) for each in scenario.tables(test)],
        "result": dict(scenario.document()),
    }


def _batch(batch: BatchReport, device: DeviceInfo | None, test: str) -> dict[str, Any]:
    timing, receipt = _timing(batch), batch.receipt
    return {
        "batch_size": batch.batch_size,
        "verdict": batch.verdict.value,
        "word": batch.word,
        "reason": batch.worst.reason if batch.worst else None,
        "judgements": [_judgement(judgement) for judgement in batch.judgements],
        "min_speedup": batch.min_speedup,
        **timing_fields(timing),
        **({} if batch.speedup is None or timing is not None else {"speedup": asdict(batch.speedup)}),
        "kernels": receipt.kernels if receipt else None,
        "capture_seconds": seconds(receipt.capture_ns) if receipt else None,
        "memory_bytes": receipt.memory_bytes if receipt else None,
        "receipt": _receipt(batch),
        "check": _check(batch.agreement) if batch.agreement else None,
        "comparison": batch.comparison,
        "baseline": baseline_fields(batch.baseline, timing, device),
        "base": base_fields(batch.base),
        "scenario": _scenario(batch.scenario, test),
    }


def _receipt(batch: BatchReport) -> dict[str, Any]:
    """The graph of this batch size, its launches, and why calls did not use it."""
    receipt = batch.receipt
    refused = [each.reason for each in batch.judgements if each.verdict is Verdict.NOT_CAPTURED]
    return {
        "operations": receipt.operations if receipt else None,
        "nodes": receipt.kernels if receipt else None,
        "opaque_regions": receipt.opaque_regions if receipt else None,
        "replays": receipt.replays if receipt else 0,
        "fallbacks": [*refused, *(receipt.fallbacks if receipt else ())],
    }


def _check(found: Agreement) -> dict[str, Any]:
    """The extent of the comparison of replay with eager."""
    return {
        "replays": found.replays,
        "bit_exact": found.bit_exact,
        "adversaries": list(found.adversaries),
        "not_compared": list(found.not_compared),
        "warnings": list(found.warnings),
        "notes": list(found.notes),
    }


def _timing(batch: BatchReport) -> Timing | None:
    return None if batch.verdict in UNTIMED else batch.timing


def _jsonable(value: Any) -> Any:
    """A value as JSON: enums by value, paths and other objects as text, numbers that are not finite as null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)

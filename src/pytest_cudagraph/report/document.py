"""The run as a document (``--cudagraph-json``, schema 1) and as JUnit properties. Times in seconds, memory in bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

from pytest_cudagraph.baseline import normal_name
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.report.generations import generation_document, generation_properties
from pytest_cudagraph.report.table import UNTIMED, Row
from pytest_cudagraph.units import to_ns, to_seconds
from pytest_cudagraph.values import (
    Agreement,
    BaseComparison,
    BatchReport,
    DeviceInfo,
    Finding,
    GraphReport,
    Interval,
    Judgement,
    Latency,
    NoBaseline,
    SavedBatch,
    Timing,
    Verdict,
)

SCHEMA = 1

_PICOSECOND_DIGITS = 12
"""Seconds are rounded to picoseconds: below any clock, and 0.000112 stays 0.000112 in the file."""


def document(
    reports: Iterable[GraphReport],
    device: DeviceInfo | None,
    settings: Any,
    calls: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Everything of a run, also of its failing tests; ``settings`` is a mapping or a dataclass."""
    return {
        "schema": SCHEMA,
        "device": None if device is None else asdict(device),
        "settings": _jsonable(asdict(settings) if _is_instance(settings) else settings),
        "tests": [_test(report) for report in reports],
        "calls": list(calls),
    }


def json_text(found: Mapping[str, Any]) -> str:
    """The document as text. Numbers that are not finite are null."""
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
        found += [("eager_seconds", f"{to_seconds(timing.eager.median_ns):.4g}")]
        found += [("replay_seconds", f"{to_seconds(timing.replay.median_ns):.4g}")]
    found += generation_properties(batch)
    if batch.receipt is not None and batch.receipt.kernels is not None:
        found.append(("kernels", str(batch.receipt.kernels)))
    return found


def _bounds(speedup: Interval) -> list[tuple[str, float]]:
    return [("", speedup.estimate), ("_low", speedup.low), ("_high", speedup.high)]


def rows_of_document(found: Mapping[str, Any]) -> list[Row]:
    """The table's rows from a document. Raises :class:`ValueError` for what is not one of schema 1."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"not a document of schema {SCHEMA} as --cudagraph-json writes it")
    try:
        return [row for test in found["tests"] for row in _rows(test)]
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"damaged: {exc!r}") from exc


def _rows(test: Mapping[str, Any]) -> list[Row]:
    if not test["batches"]:
        # Documents of earlier versions have no judgements, here and below.
        reasons = [each["reason"] for each in test.get("judgements", ()) if each["verdict"] == test["verdict"]]
        errors = [finding["message"] for finding in test["findings"] if finding["level"] == "error"]
        note = next(iter([*reasons, *errors]), "")
        return [Row(test=test["name"], batch_size=None, word=test["verdict"].replace("-", " "), note=note)]
    return [_row(test["name"], batch) for batch in test["batches"]]


def _row(name: str, batch: Mapping[str, Any]) -> Row:
    verdict = batch["verdict"].replace("-", " ")
    untimed = batch["verdict"] in [verdict.value for verdict in UNTIMED]
    return Row(
        test=name,
        batch_size=int(batch["batch_size"]),
        # Documents of earlier versions have no word.
        word=batch.get("word", verdict),
        eager_ns=_median_ns(batch["eager"]),
        compiled_ns=_median_ns(batch["compiled"]),
        replay_ns=_median_ns(batch["replay"]),
        speedup=_interval(batch["speedup"]),
        min_speedup=None if batch["min_speedup"] is None else float(batch["min_speedup"]),
        note=(batch["reason"] or "") if untimed else _kernels_note(batch),
    )


def _kernels_note(batch: Mapping[str, Any]) -> str:
    """How the graph changed. Empty if it did not."""
    if batch["baseline"] is None or batch["baseline"]["kernels"] == batch["kernels"]:
        return ""
    return next((each["reason"] for each in batch.get("judgements", ()) if each["gate"] == "structure"), "")


def _median_ns(latency: Mapping[str, Any] | None) -> float | None:
    return None if latency is None or latency["median"] is None else to_ns(float(latency["median"]))


def _interval(speedup: Mapping[str, Any] | None) -> Interval | None:
    if speedup is None or speedup["estimate"] is None:
        return None
    # A bound is null if there were too few blocks for it.
    low, high = speedup["low"], speedup["high"]
    return Interval(
        estimate=float(speedup["estimate"]),
        low=0.0 if low is None else float(low),
        high=math.inf if high is None else float(high),
    )


def _test(report: GraphReport) -> dict[str, Any]:
    return {
        "nodeid": report.nodeid,
        "name": report.name,
        "verdict": report.verdict.value,
        "compile_mode": report.compile_mode,
        "compile_seconds": None if report.compile_ns is None else _seconds(report.compile_ns),
        "findings": [_finding(finding) for finding in report.findings],
        "judgements": [_judgement(judgement) for judgement in report.judgements],
        "not_judged": list(report.not_judged),
        "notes": list(report.notes),
        "batches": [_batch(batch) for batch in report.batches],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    caller = finding.called_from
    return {
        "id": finding.id,
        "level": finding.level,
        "file": finding.site.file if finding.site else None,
        "line": finding.site.line if finding.site else None,
        "called_from": {"file": caller.file, "line": caller.line} if caller else None,
        "message": finding.message,
        "fix": finding.fix,
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


def _batch(batch: BatchReport) -> dict[str, Any]:
    timing, receipt = _timing(batch), batch.receipt
    return {
        "batch_size": batch.batch_size,
        "verdict": batch.verdict.value,
        "word": batch.word,
        "reason": batch.worst.reason if batch.worst else None,
        "judgements": [_judgement(judgement) for judgement in batch.judgements],
        "min_speedup": batch.min_speedup,
        "speedup": _speedup(timing.speedup) if timing else None,
        "eager": _latency(timing.eager) if timing else None,
        "compiled": _latency(timing.compiled) if timing and timing.compiled else None,
        "replay": _latency(timing.replay) if timing else None,
        "reference": _latency(timing.reference) if timing and timing.reference else None,
        "kernels": receipt.kernels if receipt else None,
        "capture_seconds": _seconds(receipt.capture_ns) if receipt else None,
        "memory_bytes": receipt.memory_bytes if receipt else None,
        "receipt": _receipt(batch),
        "check": _check(batch.agreement) if batch.agreement else None,
        "baseline": _baseline(batch.baseline),
        "base": _base(batch.base),
        "generation": generation_document(batch.generation),
        "prefill": None if batch.prefill is None else asdict(batch.prefill),
        "lookup": None if batch.lookup is None else asdict(batch.lookup),
        "measure_seconds": _seconds(timing.measure_ns) if timing else None,
        "blocks": timing.blocks if timing else None,
        "seed": timing.seed if timing else None,
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


def _baseline(saved: SavedBatch | NoBaseline | None) -> dict[str, Any] | None:
    if not isinstance(saved, SavedBatch):
        return None
    return {
        "speedup": _speedup(saved.speedup),
        "eager": _latency(saved.eager),
        "compiled": _latency(saved.compiled) if saved.compiled else None,
        "replay": _latency(saved.replay),
        "kernels": saved.kernels,
        "saved_at": saved.saved_at,
    }


def _base(found: BaseComparison | None) -> dict[str, Any] | None:
    """Each process's lower quartile, in the order of the pairs. Empty if a side has none."""
    if found is None:
        return None
    return {
        "revision": found.revision,
        "missing": found.missing or None,
        "base_replay": [_seconds(each) for each in found.base_replay_ns],
        "head_replay": [_seconds(each) for each in found.head_replay_ns],
    }


def _latency(latency: Latency) -> dict[str, Any]:
    return {
        "median": _seconds(latency.median_ns),
        "q25": _seconds(latency.q25_ns),
        "samples": latency.samples,
    }


def _speedup(speedup: Interval) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(speedup).items()}


def _seconds(nanoseconds: float) -> float | None:
    return round(to_seconds(nanoseconds), _PICOSECOND_DIGITS) if math.isfinite(nanoseconds) else None


def _is_instance(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _jsonable(value: Any) -> Any:
    """A setting as JSON: enums by value, paths and other objects as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)

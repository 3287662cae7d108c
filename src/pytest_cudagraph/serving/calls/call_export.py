"""The calls of a monitor as a JSON document (schema 1) and in Prometheus' text format. Times are in seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_cudagraph import files
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.serving.calls.call_summary import CallSummary, CallTotals
from pytest_cudagraph.serving.calls.histogram import from_counts
from pytest_cudagraph.serving.calls.resource_sampler import ResourceSpread, process_name
from pytest_cudagraph.serving.calls.timed_call import CallRecord, Served
from pytest_cudagraph.units import to_ns, to_seconds

SCHEMA = 1
_COUNT_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """What a monitor knows at one moment. At ``epoch_ns`` of Unix time the clock of the records was 0."""

    totals: Mapping[str, CallTotals]
    records: list[CallRecord]
    epoch_ns: int
    resources: list[ResourceSpread]


def write_export(path: Path, state: MonitorState, format: Literal["json", "openmetrics"]) -> Path:
    """Write a file, or a file of this process in a folder. Raises as :meth:`CallMonitor.export` says."""
    if format not in ("json", "openmetrics"):
        raise InputError(f"format is 'json' or 'openmetrics'; found {value_text(format)}")
    text = openmetrics(state) if format == "openmetrics" else json.dumps(document(state), allow_nan=False) + "\n"
    try:
        if path.is_dir():
            path = path / f"calls-{process_name()}{'.json' if format == 'json' else '.prom'}"
        files.write_text(path, text)
    except (OSError, ValueError) as error:
        # ValueError: a path with a null character.
        reason = getattr(error, "strerror", None) or error
        raise CudagraphError(
            f"{path}: the calls cannot be written ({reason}); no file was changed, and the monitor keeps the calls"
        ) from error
    return path


def document(state: MonitorState) -> dict[str, Any]:
    """The calls as plain data. ``docs/monitor.md`` describes each field."""
    return {
        "schema": SCHEMA,
        "process": process_name(),
        "calls": [_calls(totals.summary(name), totals) for name, totals in state.totals.items()],
        "last": [_record(record, state.epoch_ns) for record in state.records],
        "resources": [asdict(spread) for spread in state.resources],
    }


def summary_document(summary: CallSummary) -> dict[str, Any]:
    """The numbers of one name, without what merging needs."""
    durations = {
        "mean": summary.mean_ns, "standard_deviation": summary.standard_deviation_ns, "minimum": summary.minimum_ns,
        "p50": summary.p50_ns, "p90": summary.p90_ns, "p99": summary.p99_ns, "maximum": summary.maximum_ns,
    }  # fmt: skip
    return {
        "name": summary.name,
        "calls": summary.calls,
        "failures": dict(summary.failures),
        "tokens": summary.tokens,
        "rows": summary.rows,
        "duration_seconds": {key: None if each is None else to_seconds(each) for key, each in durations.items()},
        "started_at": summary.started_at_s,
        "ended_at": summary.ended_at_s,
        "calls_per_second": summary.calls_per_s,
        "tokens_per_second": summary.tokens_per_s,
        "tokens_per_second_per_user": summary.tokens_per_s_per_user,
        "served": dict(summary.served),
        "reasons": dict(summary.reasons),
        "graph_hit_ratio": summary.graph_hit_ratio,
        "synchronized": summary.synchronized,
    }


def _calls(summary: CallSummary, totals: CallTotals) -> dict[str, Any]:
    durations = totals.durations
    buckets = sorted(durations.counts)
    return summary_document(summary) | {
        "model_calls": _served(totals.served),
        "user_tokens": totals.user_tokens,
        "token_seconds": to_seconds(totals.token_ns),
        "histogram": {
            "lower_ns": buckets,
            "counts": [durations.counts[each] for each in buckets],
            "total_ns": durations.total_ns,
            "squares_ns2": float(durations.squares_ns2),
            "minimum_ns": durations.minimum_ns,
            "maximum_ns": durations.maximum_ns,
        },
    }


def _record(record: CallRecord, epoch_ns: int) -> dict[str, Any]:
    return {
        "name": record.name,
        "started_at": to_seconds(record.started_ns + epoch_ns),
        "duration_seconds": to_seconds(record.duration_ns),
        "tokens": record.tokens,
        "batch_size": record.batch_size,
        "failure": record.failure or None,
        "model_calls": None if record.served is None else _served(record.served),
        "synchronized": record.is_synchronized,
    }


def _served(served: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [{"path": path, "reason": reason, "calls": count} for (path, reason), count in served.items()]


def read_export(path: Path, epoch_ns: int) -> MonitorState:
    """An exported file. Raises :class:`~pytest_cudagraph.errors.InputError` for one that is none."""
    try:
        export = files.read_json(path)
        if not isinstance(export, dict) or export.get("schema") != SCHEMA:
            raise ValueError(f"not an export of schema {SCHEMA}")
        return MonitorState(
            totals={_text(call["name"]): _totals(call) for call in export["calls"]},
            records=[_read_record(record, epoch_ns) for record in export["last"]],
            epoch_ns=epoch_ns,
            resources=[_read_spread(spread) for spread in export["resources"]],
        )
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path} is no JSON file of CallMonitor.export ({type(error).__name__}: {error}): export it again"
        ) from error


def _totals(entry: Mapping[str, Any]) -> CallTotals:
    totals, histogram = CallTotals(), entry["histogram"]
    counts = {_count(lower): _count(n) for lower, n in zip(histogram["lower_ns"], histogram["counts"], strict=True)}
    extremes_ns = (_count_or_none(histogram[key]) for key in ("minimum_ns", "maximum_ns"))
    total_ns, squares_ns2 = _count(histogram["total_ns"]), round(_number(histogram["squares_ns2"]))
    totals.durations = from_counts(counts, total_ns, squares_ns2, *extremes_ns)
    totals.failures.update({_text(name): _count(count) for name, count in entry["failures"].items()})
    totals.served.update(_read_served(entry["model_calls"]))
    totals.tokens, totals.rows, totals.synchronized = (_count(entry[key]) for key in ("tokens", "rows", "synchronized"))
    totals.user_tokens, totals.token_ns = _number(entry["user_tokens"]), _ns(entry["token_seconds"])
    totals.started_ns, totals.ended_ns = _ns(entry["started_at"]), _ns(entry["ended_at"])
    return totals


def _read_record(entry: Mapping[str, Any], epoch_ns: int) -> CallRecord:
    return CallRecord(
        name=_text(entry["name"]),
        started_ns=_ns(entry["started_at"]) - epoch_ns,
        duration_ns=_ns(entry["duration_seconds"]),
        tokens=_count(entry["tokens"]),
        batch_size=_count_or_none(entry["batch_size"]),
        failure="" if entry["failure"] is None else _text(entry["failure"]),
        served=None if entry["model_calls"] is None else _read_served(entry["model_calls"]),
        is_synchronized=bool(entry["synchronized"]),
    )


def _read_served(entries: Iterable[Mapping[str, Any]]) -> Served:
    return {(_text(served["path"]), _text(served["reason"])): _count(served["calls"]) for served in entries}


def _read_spread(entry: Mapping[str, Any]) -> ResourceSpread:
    mean, minimum, maximum, last = (_number(entry[key]) for key in ("mean", "minimum", "maximum", "last"))
    return ResourceSpread(
        process=_text(entry["process"]),
        reading=_text(entry["reading"]),
        gpu=_count_or_none(entry["gpu"]),
        samples=_count(entry["samples"]),
        mean=mean,
        minimum=minimum,
        maximum=maximum,
        last=last,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value_text(value)} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
        raise ValueError(f"{value_text(value)} is no count")
    return value


def _count_or_none(value: Any) -> int | None:
    return None if value is None else _count(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value_text(value)} is no number")
    return float(value)


def _ns(seconds: Any) -> int:
    return round(to_ns(_number(seconds)))


_LIMITS_NS = (*((1 << power) * quarter // 4 for power in range(13, 36) for quarter in range(4, 8)), 1 << 36)
"""8 µs to 69 s, four in each power of two: bounds of our buckets, so that the counts are exact."""

_GAUGES = {
    "rss_bytes": ("process_rss", "bytes", 1),
    "cpu_ratio": ("process_cpu", "ratio", 1),
    "load_average": ("load_average", "", 1),
    "cpu_mhz": ("cpu_clock", "hertz", 1e6),
    "swap_used_bytes": ("swap_used", "bytes", 1),
    "memory_used_bytes": ("gpu_memory_used", "bytes", 1),
    "utilization_ratio": ("gpu_utilization", "ratio", 1),
    "power_w": ("gpu_power", "watts", 1),
    "sm_clock_mhz": ("gpu_sm_clock", "hertz", 1e6),
    "temperature_c": ("gpu_temperature", "celsius", 1),
}


def openmetrics(state: MonitorState) -> str:
    """The state in OpenMetrics 1.0, which Prometheus reads: counters, a histogram for each name, gauges."""
    named = [(name, totals) for name, totals in state.totals.items()]
    lines = [
        *_family("call_duration", "histogram", "seconds", "Durations of calls that succeeded."),
        *(line for name, totals in named for line in _histogram(name, totals)),
        *_family("calls_failed", "counter", "", "Calls that raised, by the class of the exception."),
        *(_sample("calls_failed_total", count, name=name, error=error)
          for name, totals in named for error, count in totals.failures.items()),
        *_family("call_tokens", "counter", "", "Tokens of calls that succeeded."),
        *(_sample("call_tokens_total", totals.tokens, name=name) for name, totals in named),
        *_family("call_rows", "counter", "", "Batch sizes of calls that succeeded, added up."),
        *(_sample("call_rows_total", totals.rows, name=name) for name, totals in named),
        *_family("model_calls", "counter", "", "Calls of models that a runner served, by path and reason."),
        *(_sample("model_calls_total", count, name=name, path=path, reason=reason)
          for name, totals in named for (path, reason), count in totals.served.items()),
        *_gauges(state.resources),
    ]  # fmt: skip
    # One name with half a character (of a file name that is no UTF-8) would make every scrape fail.
    return "\n".join([*lines, "# EOF", ""]).encode("utf-8", errors="backslashreplace").decode("utf-8")


def _family(name: str, kind: str, unit: str, help_text: str) -> list[str]:
    full = f"cudagraph_{name}{f'_{unit}' if unit else ''}"
    units = [f"# UNIT {full} {unit}"] if unit else []
    return [f"# TYPE {full} {kind}", *units, f"# HELP {full} {help_text}"]


def _histogram(name: str, totals: CallTotals) -> Iterator[str]:
    durations = totals.durations
    for limit_ns, count in zip(_LIMITS_NS, durations.below(_LIMITS_NS), strict=True):
        yield _sample("call_duration_seconds_bucket", count, name=name, le=repr(to_seconds(limit_ns)))
    yield _sample("call_duration_seconds_bucket", durations.count, name=name, le="+Inf")
    yield _sample("call_duration_seconds_count", durations.count, name=name)
    yield _sample("call_duration_seconds_sum", to_seconds(durations.total_ns), name=name)


def _gauges(spreads: list[ResourceSpread]) -> Iterator[str]:
    for reading, (name, unit, factor) in _GAUGES.items():
        of_reading = [spread for spread in spreads if spread.reading == reading]
        if of_reading:
            yield from _family(name, "gauge", unit, f"The last reading of {name.replace('_', ' ')}.")
        for spread in of_reading:
            gpu = {} if spread.gpu is None else {"gpu": str(spread.gpu)}
            full = f"{name}_{unit}" if unit else name
            yield _sample(full, spread.last * factor, process=spread.process, **gpu)


def _sample(metric: str, value: float, /, **labels: str) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"cudagraph_{metric}{{{shown}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

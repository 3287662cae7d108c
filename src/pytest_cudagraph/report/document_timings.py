"""What was measured, in the JSON document: latencies, speedup, the saved entry, another revision. Times in seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pytest_cudagraph.baseline import latency_change
from pytest_cudagraph.units import to_seconds
from pytest_cudagraph.values import (
    BaseComparison,
    DeviceInfo,
    Latency,
    LatencyChange,
    NoBaseline,
    SavedBatch,
    Session,
    Timing,
)

_PICOSECOND_DIGITS = 12
"""Seconds are rounded to picoseconds: below any clock, and 0.000112 stays 0.000112 in the file."""

_RATIO_DIGITS = 6


def seconds(nanoseconds: float | None) -> float | None:
    """Seconds of a document."""
    return None if nanoseconds is None else round(to_seconds(nanoseconds), _PICOSECOND_DIGITS)


def _arm_fields(latency: Latency | None, judged_ns: float | None) -> dict[str, Any] | None:
    """An arm of the measurement, with what the table shows of it."""
    fields = latency_fields(latency)
    return None if fields is None else {**fields, "judged": seconds(judged_ns)}


def latency_fields(latency: Latency | None) -> dict[str, Any] | None:
    """The distribution of one arm. None without a measurement."""
    if latency is None:
        return None
    return {
        "minimum": seconds(latency.minimum_ns),
        "q25": seconds(latency.q25_ns),
        "median": seconds(latency.median_ns),
        "q75": seconds(latency.q75_ns),
        "q90": seconds(latency.q90_ns),
        "samples": latency.samples,
    }


def timing_fields(timing: Timing | None) -> dict[str, Any]:
    """The keys of a batch size that one measurement fills. All are None without one."""
    if timing is None:
        return dict.fromkeys(_TIMING)
    return {
        "speedup": asdict(timing.speedup),
        "attainable_speedup": _ratio(timing.attainable_ratio),
        "eager": _arm_fields(timing.eager, timing.medians.eager_ns),
        "compiled": _arm_fields(timing.compiled, timing.medians.compiled_ns),
        "replay": _arm_fields(timing.replay, timing.medians.replay_ns),
        "device_replay": latency_fields(timing.device_replay),
        "reference": latency_fields(timing.reference),
        "decision": timing.decision,
        "noise_ratio": _ratio(timing.noise_ratio),
        "detectable_ratio": _ratio(timing.detectable_ratio),
        "blocks": timing.blocks,
        "discarded": timing.discarded,
        "disturbance": timing.disturbance,
        "measure_seconds": seconds(timing.measure_ns),
        "seed": timing.seed,
    }


_TIMING = (
    "speedup", "attainable_speedup", "eager", "compiled", "replay", "device_replay", "reference", "decision",
    "noise_ratio", "detectable_ratio", "blocks", "discarded", "disturbance", "measure_seconds", "seed",
)  # fmt: skip


def baseline_fields(
    saved: SavedBatch | NoBaseline | None, timing: Timing | None, device: DeviceInfo | None
) -> dict[str, Any] | None:
    """The saved entry, its sessions, and where a session of unchanged code would lie today."""
    if not isinstance(saved, SavedBatch):
        return None
    change = latency_change(saved, timing, device) if timing and device else None
    return {
        "speedup": asdict(saved.speedup),
        "eager": latency_fields(saved.eager),
        "compiled": latency_fields(saved.compiled),
        "replay": latency_fields(saved.replay),
        "kernels": saved.kernels,
        "saved_at": saved.saved_at,
        "sessions": [_session(each) for each in saved.sessions],
        "unchanged": None if change is None else _unchanged(change),
    }


def _session(session: Session) -> dict[str, Any]:
    return {
        "date": session.date,
        "commit": session.commit,
        "software": session.software,
        "q25": seconds(session.q25_ns),
        "median": seconds(session.median_ns),
        "reference_q25": seconds(session.reference_q25_ns),
        "reference_median": seconds(session.reference_median_ns),
    }


def _unchanged(change: LatencyChange) -> dict[str, Any]:
    low_ns, high_ns = change.unchanged_ns
    return {
        "statistic": change.what,
        "low": seconds(low_ns),
        "high": seconds(high_ns),
        "divided": change.reference_ns is not None,
    }


def base_fields(found: BaseComparison | None) -> dict[str, Any] | None:
    """Each process's lower quartile, in the order of the pairs. Empty if a side has none."""
    if found is None:
        return None
    return {
        "revision": found.revision,
        "missing": found.missing or None,
        "base_replay": [seconds(each) for each in found.base_replay_ns],
        "head_replay": [seconds(each) for each in found.head_replay_ns],
        "change": None if found.change is None else asdict(found.change),
    }


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, _RATIO_DIGITS)

"""The table of engines in two modes, and their part of the JSON document and of JUnit's properties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pytest_cudagraph.report.columns import Column, grid
from pytest_cudagraph.report.document_timings import generation_times_fields
from pytest_cudagraph.units import bytes_text, latency_text, seconds_text, to_seconds
from pytest_cudagraph.values import BatchReport, EngineMode, EngineModes

_TITLES = "mode|load|capture|host|device|TTFT|ITL|tokens/s|replays"


def modes_table(found: Iterable[tuple[str, BatchReport]]) -> list[str]:
    """Two lines per engine, eager and graphs, if there is an engine. The test's name is before each batch."""
    rows = []
    for name, batch in found:
        if batch.modes is not None:
            rows += [[name, *_cells(each, mode)] for each, mode in _named(batch.modes)]
    columns = [Column(title="engine modes", right=False), *(Column(title=each) for each in _TITLES.split("|"))]
    return grid(columns, rows) if rows else []


def _named(modes: EngineModes) -> list[tuple[str, EngineMode]]:
    return [("eager", modes.eager), ("graphs", modes.graphs)]


def _cells(name: str, mode: EngineMode) -> list[str]:
    times, receipt = mode.times, mode.receipt
    return [
        name,
        "-" if mode.load_ns is None else seconds_text(mode.load_ns),
        "-" if mode.capture_ns is None else seconds_text(mode.capture_ns),
        "-" if mode.host_bytes is None else bytes_text(mode.host_bytes),
        "-" if mode.device_bytes is None else bytes_text(mode.device_bytes),
        "-" if times is None else latency_text(times.ttft.median_ns),
        "-" if times is None else latency_text(times.itl.median_ns),
        "-" if times is None else f"{times.tokens_per_second:.0f}",
        "failed" if mode.failure else "not told" if receipt is None else f"{receipt.replays}/{receipt.steps}",
    ]


def modes_document(modes: EngineModes | None) -> dict[str, Any] | None:
    """Both modes in the JSON document: times in seconds."""
    if modes is None:
        return None
    return {
        "engine": modes.engine,
        "output_length": modes.output_length,
        "tokens": None if modes.tokens is None else asdict(modes.tokens),
        "speedup": None if modes.speedup is None else asdict(modes.speedup),
        **{name: _mode(mode) for name, mode in _named(modes)},
    }


def _mode(mode: EngineMode) -> dict[str, Any]:
    return {
        "load_seconds": None if mode.load_ns is None else to_seconds(mode.load_ns),
        "capture_seconds": None if mode.capture_ns is None else to_seconds(mode.capture_ns),
        "host_bytes": mode.host_bytes,
        "device_bytes": mode.device_bytes,
        "times": None if mode.times is None else generation_times_fields(mode.times),
        "itl_medians": [to_seconds(each) for each in mode.itl_medians_ns],
        "receipt": None if mode.receipt is None else asdict(mode.receipt),
        "failure": None if mode.failure is None else asdict(mode.failure),
    }


def modes_properties(batch: BatchReport) -> list[tuple[str, str]]:
    """``graphs_load_seconds``, ``graphs_host_bytes``, ``graphs_itl_seconds`` and so on, of both modes."""
    if batch.modes is None:
        return []
    found = [] if batch.modes.speedup is None else [("speedup", f"{batch.modes.speedup.estimate:.2f}")]
    for name, mode in _named(batch.modes):
        told: dict[str, float | None] = {
            "load_seconds": None if mode.load_ns is None else to_seconds(mode.load_ns),
            "capture_seconds": None if mode.capture_ns is None else to_seconds(mode.capture_ns),
            "host_bytes": mode.host_bytes,
            "device_bytes": mode.device_bytes,
            "ttft_seconds": None if mode.times is None else to_seconds(mode.times.ttft.median_ns),
            "itl_seconds": None if mode.times is None else to_seconds(mode.times.itl.median_ns),
            "tokens_per_second": None if mode.times is None else mode.times.tokens_per_second,
        }
        found += [(f"{name}_{key}", f"{value:.4g}") for key, value in told.items() if value is not None]
    return found

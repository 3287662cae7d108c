"""The table of generations, and their part of the JSON document and of JUnit's properties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pytest_cudagraph.report.columns import Column, grid
from pytest_cudagraph.units import bytes_text, latency_text, to_seconds
from pytest_cudagraph.values import BatchReport, Generation, GenerationTimes, GraphReport, Latency, Lookup, Prefill

_TITLES = ("batch", "TTFT", "ITL", "ITL p99", "tokens/s", "replays", "padded", "ties")


def generation_table(reports: Iterable[GraphReport]) -> list[str]:
    """One line for each generation that was timed: medians. Empty without one."""
    rows = [
        [report.name, *_cells(batch.generation, batch.generation.times)]
        for report in reports
        for batch in report.batches
        if batch.generation is not None and batch.generation.times is not None
    ]
    columns = [Column(title="generation", right=False), *(Column(title=title) for title in _TITLES)]
    return grid(columns, rows) if rows else []


_PREFILL = ("prompt", "chunk", "ratio", "counting", "one call", "chunks")


def prefill_table(reports: Iterable[GraphReport]) -> list[str]:
    """One line for each prefill in chunks: the bytes that are counted. Empty without one."""
    rows = [
        [report.name, *_prefill_cells(batch.prefill)]
        for report in reports
        for batch in report.batches
        if batch.prefill is not None
    ]
    columns = [Column(title="prefill", right=False), *(Column(title=title) for title in _PREFILL)]
    return grid(columns, rows) if rows else []


def _prefill_cells(found: Prefill) -> list[str]:
    bytes_of = [bytes_text(each.total(found.counting)) for each in (found.whole, found.chunked)]
    return [str(found.prompt_length), str(found.chunk), f"{found.bytes_ratio:.3f}", found.counting, *bytes_of]


_LOOKUP = ("batch", "k", "tokens/step", "acceptance", "mean length", "replays", "ties")


def lookup_table(reports: Iterable[GraphReport]) -> list[str]:
    """One line for each generation with prompt lookup. Empty without one."""
    rows = [
        [report.name, *_lookup_cells(batch.lookup)]
        for report in reports
        for batch in report.batches
        if batch.lookup is not None
    ]
    columns = [Column(title="prompt lookup", right=False), *(Column(title=title) for title in _LOOKUP)]
    return grid(columns, rows) if rows else []


def _lookup_cells(found: Lookup) -> list[str]:
    return [
        str(found.batch_size),
        str(found.k),
        f"{found.tokens_per_step:.2f}",
        f"{found.acceptance_ratio:.0%}",
        f"{found.mean_acceptance_length:.2f}",
        f"{found.receipt.replays}/{found.receipt.steps}",
        str(found.tokens.ties if found.tokens else "-"),
    ]


def _cells(found: Generation, times: GenerationTimes) -> list[str]:
    return [
        str(found.batch_size),
        latency_text(times.ttft.median_ns),
        latency_text(times.itl.median_ns),
        latency_text(times.itl_p99_ns),
        f"{times.tokens_per_second:.0f}",
        f"{found.receipt.replays}/{found.receipt.steps}",
        str(found.receipt.padded_rows),
        str(found.tokens.ties if found.tokens else "-"),
    ]


def generation_document(found: Generation | None) -> dict[str, Any] | None:
    """A generation in the JSON document: times in seconds."""
    if found is None:
        return None
    return {
        "prompt_length": found.prompt_length,
        "output_length": found.output_length,
        "receipt": asdict(found.receipt),
        "tokens": None if found.tokens is None else asdict(found.tokens),
        "times": None if found.times is None else _times(found.times),
    }


def _times(times: GenerationTimes) -> dict[str, Any]:
    return {
        "generations": times.generations,
        "ttft": _latency(times.ttft),
        "itl": _latency(times.itl) | {"p99": to_seconds(times.itl_p99_ns)},
        "tpot": to_seconds(times.tpot_ns),
        "tokens_per_second": times.tokens_per_second,
    }


def _latency(latency: Latency) -> dict[str, Any]:
    return {
        "median": to_seconds(latency.median_ns),
        "q25": to_seconds(latency.q25_ns),
        "samples": latency.samples,
    }


def generation_properties(batch: BatchReport) -> list[tuple[str, str]]:
    """``tokens_per_second``, ``ttft_seconds``, ``itl_seconds`` of a generation that was timed."""
    times = None if batch.generation is None else batch.generation.times
    if times is None:
        return []
    return [
        ("tokens_per_second", f"{times.tokens_per_second:.4g}"),
        ("ttft_seconds", f"{to_seconds(times.ttft.median_ns):.4g}"),
        ("itl_seconds", f"{to_seconds(times.itl.median_ns):.4g}"),
    ]

"""The tables of generations, and their part of the JSON document and of JUnit's properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pytest_cudagraph.decoding.modes.tables import modes_table
from pytest_cudagraph.report.columns import Column, grid
from pytest_cudagraph.report.document_timings import generation_times_fields, latency_fields, seconds
from pytest_cudagraph.units import bytes_text, latency_text, percent_text, to_seconds
from pytest_cudagraph.values import BatchReport, Generation, GraphReport, Guided, GuidedTimes, TokenAgreement

Cells = Callable[[BatchReport], "list[str] | None"]
"""The cells of a batch, without the test's name. None where the table is not about it."""


def generation_tables(reports: Iterable[GraphReport], shown: Mapping[str, str]) -> list[str]:
    """A table of generations, of prefills, of prompt lookups, of guided generations and of engines, if it has a row.

    ``shown`` are the names of the reports as the table above shows them.
    """
    reports = list(reports)
    found = [(shown.get(report.name, report.name), batch) for report in reports for batch in report.batches]
    lines = []
    for title, titles, cells in _TABLES:
        rows = [[name, *row] for name, batch in found if (row := cells(batch)) is not None]
        columns = [Column(title=title, right=False), *(Column(title=each) for each in titles.split("|"))]
        lines += grid(columns, rows) if rows else []
    return [*lines, *_prompt_length_table(reports), *modes_table(found)]


def _prompt_length_table(reports: Iterable[GraphReport]) -> list[str]:
    """TTFT and memory over the prompt's length, for each test with several lengths."""
    points: dict[str, dict[tuple[int, int], Generation]] = {}
    for report in reports:
        for generation in (batch.generation for batch in report.batches if batch.generation and batch.generation.times):
            points.setdefault(report.nodeid, {})[generation.batch_size, generation.prompt_length] = generation
    several = {name: found for name, found in points.items() if len({length for _, length in found}) > 1}
    rows = [[name, *_prompt_length_cells(found[key])] for name, found in several.items() for key in sorted(found)]
    titles = ("batch", "prompt", "TTFT", "activations", "cache", "weights")
    columns = [Column(title="prompt lengths", right=False), *(Column(title=title) for title in titles)]
    return grid(columns, rows) if rows else []


def _prompt_length_cells(found: Generation) -> list[str]:
    ttft = "-" if found.times is None else latency_text(found.times.ttft.median_ns)
    parts = ("activations_bytes", "cache_bytes", "weights_bytes")
    texts = ["-" if found.bytes is None else bytes_text(getattr(found.bytes, part)) for part in parts]
    return [str(found.batch_size), str(found.prompt_length), ttft, *texts]


def _generation_cells(batch: BatchReport) -> list[str] | None:
    found, times = batch.generation, batch.generation.times if batch.generation else None
    if found is None or times is None:
        return None
    return [
        str(found.batch_size),
        latency_text(times.ttft.median_ns),
        latency_text(times.itl.median_ns),
        latency_text(times.itl_p99_ns),
        f"{times.tokens_per_second:.0f}",
        f"{found.receipt.replays}/{found.receipt.steps}",
        str(found.receipt.padded_rows),
        _ties(found.tokens),
    ]


def _prefill_cells(batch: BatchReport) -> list[str] | None:
    found = batch.prefill
    if found is None:
        return None
    bytes_of = [bytes_text(each.total(found.counting)) for each in (found.whole, found.chunked)]
    return [str(found.prompt_length), str(found.chunk), f"{found.bytes_ratio:.3f}", found.counting, *bytes_of]


def _lookup_cells(batch: BatchReport) -> list[str] | None:
    found = batch.lookup
    if found is None:
        return None
    return [
        str(found.batch_size),
        str(found.k),
        f"{found.tokens_per_step:.2f}",
        f"{found.acceptance_ratio:.0%}",
        f"{found.mean_acceptance_length:.2f}",
        f"{found.receipt.replays}/{found.receipt.steps}",
        _ties(found.tokens),
    ]


def _guided_cells(batch: BatchReport) -> list[str] | None:
    found, times = batch.guided, batch.guided.times if batch.guided else None
    if found is None:
        return None
    replays, steps = (getattr(found.receipt, name) + getattr(found.choices, name) for name in ("replays", "steps"))
    return [
        str(found.batch_size),
        found.grammar,
        f"{found.valid}/{found.completed}" if found.is_parsed else "-",
        str(found.cut),
        "-" if times is None else latency_text(times.mask_ns),
        "-" if times is None else percent_text(times.mask_share),
        "-" if times is None else percent_text(times.overhead.estimate),
        f"{replays}/{steps}",
        _ties(found.tokens),
    ]


def _ties(found: TokenAgreement | None) -> str:
    return "-" if found is None else str(found.ties)


_TABLES: tuple[tuple[str, str, Cells], ...] = (
    ("generation", "batch|TTFT|ITL|ITL p99|tokens/s|replays|padded|ties", _generation_cells),
    ("prefill", "prompt|chunk|ratio|counting|one call|chunks", _prefill_cells),
    ("prompt lookup", "batch|k|tokens/step|acceptance|mean length|replays|ties", _lookup_cells),
    ("guided", "batch|grammar|valid|cut|mask/row|share|overhead|replays|ties", _guided_cells),
)


def generation_document(found: Generation | None) -> dict[str, Any] | None:
    """A generation in the JSON document: times in seconds."""
    if found is None:
        return None
    return {
        "prompt_length": found.prompt_length,
        "output_length": found.output_length,
        "receipt": asdict(found.receipt),
        "tokens": None if found.tokens is None else asdict(found.tokens),
        "times": None if found.times is None else generation_times_fields(found.times),
        "bytes": None if found.bytes is None else asdict(found.bytes),
    }


def guided_document(found: Guided | None) -> dict[str, Any] | None:
    """A guided generation in the JSON document: times in seconds."""
    if found is None:
        return None
    counts = {name: getattr(found, name) for name in ("completed", "cut", "valid", "valid_ratio")}
    return asdict(found) | counts | {"times": None if found.times is None else _guided_times(found.times)}


def _guided_times(times: GuidedTimes) -> dict[str, Any]:
    return {
        "greedy": latency_fields(times.greedy),
        "guided": latency_fields(times.guided),
        "overhead": asdict(times.overhead),
        "mask": seconds(times.mask_ns),
        "mask_share": times.mask_share,
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

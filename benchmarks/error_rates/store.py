"""The tallies of a run as a JSON file: read by the figure and the tables of the docs, and by a run that goes on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.error_rates.cells import Cell, Tally
from benchmarks.error_rates.trial import THRESHOLD_RATIO

from pytest_cudagraph.values import Verdict

SCHEMA = 1
_ROOT = Path(__file__).resolve().parents[2]
_DECIDING = (
    "src/pytest_cudagraph/measure/*.py",
    "src/pytest_cudagraph/stopping/*.py",
    "benchmarks/error_rates/[cmnst]*.py",
)
_SHOWING = ("table.py", "store.py")


class OtherRun(Exception):
    """A file that cannot be continued; the message says why."""


def source_digest() -> str:
    """Of the code that decides what a trial ends with."""
    digest = hashlib.sha256()
    for pattern in _DECIDING:
        for path in sorted(_ROOT.glob(pattern)):
            if path.name not in _SHOWING:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def head(seed: int, budget_s: float) -> dict[str, Any]:
    """What two runs must share to be one."""
    return {"schema": SCHEMA, "seed": seed, "budget_seconds": budget_s, "source": source_digest()}


def write(path: Path, cells: Sequence[Cell], tallies: Mapping[str, Tally], facts: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    versions = {name: metadata.version(name) for name in ("numpy", "pytest-benchmark")}
    document = {
        **facts,
        "threshold_ratio": THRESHOLD_RATIO,
        "python": platform.python_version(),
        "versions": versions,
        "cells": [_row(cell, tallies[cell.name]) for cell in cells if cell.name in tallies],
    }
    temporary = path.with_name(f".{path.name}.tmp")
    lines = json.dumps(document, ensure_ascii=False).replace('{"scenario"', '\n{"scenario"')
    temporary.write_text(lines + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    """The document as written."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def resumed(path: Path, cells: Sequence[Cell], facts: Mapping[str, Any]) -> dict[str, Tally]:
    """The tallies of a run with the same seed, budget and source; empty without a file. Raises :class:`OtherRun`."""
    if not path.exists():
        return {}
    document = read(path)
    for name, value in facts.items():
        if document.get(name) != value:
            raise OtherRun(f"{path} cannot be continued: its {name} is {document.get(name)!r}, now {value!r}")
    known = {cell.name for cell in cells}
    found = {f"{row['scenario']} at {row['relative']:.2f}": tally_of(row) for row in document["cells"]}
    return {name: tally for name, tally in found.items() if name in known}


def tally_of(row: Mapping[str, Any]) -> Tally:
    """The tally in one row of a document."""
    return Tally(
        verdicts=Counter({verdict: row[verdict.value] for verdict in _VERDICTS if row[verdict.value]}),
        calls=Counter({int(value): count for value, count in row["calls"].items()}),
        spent_ms=Counter({int(value): count for value, count in row["spent_ms"].items()}),
        peer_min_passes=row["peer_min_passes"],
        peer_median_passes=row["peer_median_passes"],
    )


_VERDICTS = (Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE)


def _row(cell: Cell, tally: Tally) -> dict[str, Any]:
    return {
        "scenario": cell.scenario.name,
        "group": cell.scenario.group,
        "length": cell.scenario.length,
        "relative": cell.relative,
        "trials": tally.trials,
        **{verdict.value: tally.verdicts[verdict] for verdict in _VERDICTS},
        "peer_min_passes": tally.peer_min_passes,
        "peer_median_passes": tally.peer_median_passes,
        "spent_ms": {str(value): tally.spent_ms[value] for value in sorted(tally.spent_ms)},
        "calls": {str(value): tally.calls[value] for value in sorted(tally.calls)},
    }

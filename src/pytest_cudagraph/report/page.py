"""The HTML page of a run, from its JSON document alone. ``pytest-cudagraph report --html`` makes the same one later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_cudagraph.report.document_rows import device_of_document, rows_of_document
from pytest_cudagraph.report.page_tables import findings_of, tables_of
from pytest_cudagraph.report.page_tests import FACTS, kind_of, page_rows, page_tests
from pytest_cudagraph.report.rendering import rendered
from pytest_cudagraph.report.table import Row, without_common_folder

_FOLDED_ROWS = 400
"""With more rows, table and tests are folded, so that the page opens at once."""

_WORST = ("not captured", "wrong", "failed", "slower", "inconclusive", "no baseline yet", "not judged", "passed")


def page(found: Mapping[str, Any]) -> str:
    """The page as text. Raises :class:`ValueError` for what is no document of schema 1.

    :class:`~pytest_cudagraph.errors.CudagraphError` without jinja2. Sections that this version does not know are left
    out.
    """
    rows = rows_of_document(found)
    try:
        view = _view(found, rows)
    except (KeyError, TypeError, AttributeError, OverflowError) as exc:
        raise ValueError(f"damaged: {exc!r}") from exc
    return rendered("run.html", view)


def _view(found: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    shown = page_rows(found, without_common_folder(rows))
    folded = len(rows) > _FOLDED_ROWS
    tests = page_tests(found, folded=folded)
    return {
        "title": f"CUDA graphs: {_counts_text(rows)}",
        "subtitle": " · ".join(_subtitle(found)),
        "counts": _counts(rows),
        "rows": shown,
        "rows_folded": folded,
        "compiled": any(row.compiled_ns is not None for row in rows),
        "limits": any(row.limit for row in shown),
        "saved": any(test["sessions"] for test in tests),
        "tests": tests,
        "fact_titles": FACTS,
        "findings": findings_of(found),
        "tables": tables_of(found),
        "machine": _machine(found),
    }


def _counts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    counted = Counter(row.word for row in rows)
    words = sorted(counted, key=lambda word: _WORST.index(word) if word in _WORST else len(_WORST))
    return [{"word": word, "number": counted[word], "kind": kind_of(word)} for word in words]


def _counts_text(rows: Sequence[Row]) -> str:
    return ", ".join(f"{each['number']} {each['word']}" for each in _counts(rows)) or "nothing measured"


def _subtitle(found: Mapping[str, Any]) -> list[str]:
    """``2026-11-22 10:00 UTC``, ``commit 1a2b3c4 on main, with uncommitted changes``, the device."""
    parts = []
    if found.get("date"):
        parts.append(f"{found['date'][:16].replace('T', ' ')} UTC")
    commit = found.get("commit")
    if commit:
        dirty = ", with uncommitted changes" if commit.get("dirty") else ""
        parts.append(f"commit {commit['id'][:7]} on {commit.get('branch')}{dirty}")
    device = device_of_document(found)
    return [*parts, device] if device else parts


_MACHINE = {
    "name": "device",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "python": "Python",
    "host_cpu": "host CPU",
    "threads": "torch threads",
    "platform": "platform",
    "mig": "MIG profile",
    "power_limit_w": "power limit in W",
    "clocks": "clocks",
}


def _machine(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    device = found.get("device") or {}
    return [(name, str(device[key])) for key, name in _MACHINE.items() if device.get(key) is not None]

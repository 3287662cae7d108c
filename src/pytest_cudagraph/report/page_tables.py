"""The other sections of the HTML page: findings, what was not judged, notes, scenarios, calls, workloads, settings.

A new part of the document gets a function here and its place in :data:`_SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pytest_cudagraph.report.rankings import TITLES, ranking_rows
from pytest_cudagraph.units import bytes_text, latency_text, to_ns
from pytest_cudagraph.values import Column, Table

_NAMED = 5
"""Tests that a finding or a reason names. The rest is counted."""


def tables_of(found: Mapping[str, Any]) -> list[Table]:
    """The sections that have rows."""
    sections = [table for section in _SECTIONS if (table := section(found)) is not None]
    return [*(_stored(each) for each in found["tables"]), *sections]


def _stored(found: Mapping[str, Any]) -> Table:
    columns = tuple(Column(**each) for each in found["columns"])
    rows = {key: tuple(map(tuple, found[key])) for key in ("rows", "remarks")}
    return Table(**{**found, "columns": columns, **rows})


def _table(
    title: str, columns: str, rows: Iterable[list[str]], *, words: str = "", note: str = "", folded: bool = False
) -> Table | None:
    """``columns`` are titles, separated by bars. Those in ``words`` are aligned left."""
    shown = tuple(map(tuple, rows))
    titles = tuple(Column(title=each, right=each not in words.split("|")) for each in columns.split("|"))
    return Table(title=title, columns=titles, rows=shown, note=note, folded=folded) if shown else None


def findings_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each finding of the audit once, with the tests that have it. Errors first, then warnings."""
    tests: dict[tuple[Any, ...], list[str]] = {}
    for test in found["tests"]:
        for each in test["findings"]:
            place = _place(each, found["settings"].get("rootdir"))
            remedy = f"accepted: {each['accepted']}" if each.get("accepted") else each["fix"]
            key = (each["level"], each["id"], place, each["message"], each.get("evidence", ""), remedy)
            tests.setdefault(key, []).append(test["name"])
    shown = [_finding(key, names) for key, names in tests.items()]
    return sorted(shown, key=lambda each: (each["level"] != "error", each["level"] != "warning"))


def _finding(key: tuple[Any, ...], names: list[str]) -> dict[str, Any]:
    level, id_, place, message, evidence, remedy = key
    kind = {"error": "bad", "warning": "warn"}.get(level, "none")
    return {"level": level, "id": id_, "place": place, "message": message, "evidence": evidence,
            "remedy": remedy, "kind": kind, "tests": _named(names)}  # fmt: skip


def _place(finding: Mapping[str, Any], root: Any) -> str:
    """``model.py:12 in forward, called from tests/test_model.py:4``. Below the root directory, paths are relative."""
    if not finding["file"]:
        return ""
    inside = f" in {finding['function']}" if finding.get("function") else ""
    caller = finding.get("called_from")
    called = f", called from {_relative(caller['file'], root)}:{caller['line']}" if caller else ""
    return f"{_relative(finding['file'], root)}:{finding['line']}{inside}{called}"


def _relative(file: str, root: Any) -> str:
    return file.removeprefix(f"{root}/") if root else file


def _named(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "\n".join(names[:_NAMED]) + more


def _not_judged(found: Mapping[str, Any]) -> Table | None:
    where: dict[str, list[str]] = {}
    for test in found["tests"]:
        for name, judged in _parts(test):
            for each in judged.get("judgements", ()):
                if each["verdict"] == "not-judged":
                    where.setdefault(each["reason"], []).append(name)
            for what in (judged.get("check") or {}).get("not_compared", ()):
                where.setdefault(f"not compared: {what}", []).append(name)
        for what in test.get("not_judged", ()):
            where.setdefault(what, []).append(test["name"])
    rows = ([what, str(len(names)), _named(names)] for what, names in where.items())
    return _table("Not judged", "what and why|count|where", rows, words="what and why|where")


def _notes(found: Mapping[str, Any]) -> Table | None:
    where: dict[tuple[str, str], list[str]] = {}
    for test in found["tests"]:
        for name, judged in _parts(test):
            check = judged.get("check") or {}
            for kind, key in (("warning", "warnings"), ("note", "notes")):
                for text in check.get(key, ()):
                    where.setdefault((kind, text), []).append(name)
        for text in test.get("notes", ()):
            where.setdefault(("note", text), []).append(test["name"])
    rows = ([*key, _named(names)] for key, names in sorted(where.items(), key=lambda each: each[0][0] != "warning"))
    return _table("Warnings and notes", "kind|text|where", rows, words="kind|text|where")


def _parts(test: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The model as a whole, and each batch size, by name."""
    yield test["name"], {key: test.get(key, ()) for key in ("judgements",)}
    yield from ((f"{test['name']}, batch {batch['batch_size']}", batch) for batch in test["batches"])


def _batches(found: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for test in found["tests"]:
        yield from ((test["name"], batch, batch[key]) for batch in test["batches"] if batch.get(key))


def _bytes(count: float | None) -> str:
    return "-" if count is None else bytes_text(count)


def _ties(each: Mapping[str, Any]) -> str:
    return _text(each["tokens"]["ties"]) if each.get("tokens") else "-"


def _calls(found: Mapping[str, Any]) -> Table | None:
    rows = []
    for each in found.get("calls", ()):
        durations = [_latency(each["duration_seconds"][key]) for key in ("p50", "p90", "p99")]
        tokens, hits = each["tokens_per_second"], each["graph_hit_ratio"]
        rates = ["-" if tokens is None else f"{tokens:.0f}", "-" if hits is None else f"{hits:.0%}"]
        counts = [_text(each["calls"]), _text(sum(each["failures"].values()))]
        rows.append([each["nodeid"], each["name"], *counts, *durations, *rates])
    columns = "test|name|calls|failures|p50|p90|p99|tokens/s|by graph"
    return _table("Monitored calls", columns, rows, words="test|name")


def _workloads(found: Mapping[str, Any]) -> Table | None:
    columns, rows = "|".join(("group", *TITLES, "reason")), ranking_rows(found)
    return _table("Workloads", columns, rows, words="group|workload|by|reason", note="a rank is a range where the "
                  "measurement does not decide")  # fmt: skip


def _tuned(found: Mapping[str, Any]) -> Table | None:
    rows = ([each["nodeid"], "\n".join(each["lines"])] for each in found.get("tuned", ()))
    return _table("Tuned", "test|result", rows, words="test|result")


def _settings(found: Mapping[str, Any]) -> Table | None:
    rows = ([name, _setting(value)] for name, value in found["settings"].items())
    return _table("Settings", "setting|value", rows, words="setting|value", folded=True)


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "off" if value in (None, False) else str(value)


def _latency(seconds: float | None) -> str:
    return "-" if seconds is None else latency_text(to_ns(seconds))


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


_SECTIONS: tuple[Callable[[Mapping[str, Any]], Table | None], ...] = (
    _not_judged,
    _notes,
    _calls,
    _workloads,
    _tuned,
    _settings,
)

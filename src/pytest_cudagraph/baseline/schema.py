"""A baseline file read: pytest-benchmark's JSON schema, so that its tools and those built on it read our files too.

One record per name, batch size and arm. What pytest-benchmark has no place for stands under
``extra_info["cudagraph"]``. All times are seconds. :mod:`pytest_cudagraph.baseline.text` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_cudagraph.baseline import fields
from pytest_cudagraph.baseline.names import Key
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.files import parse_json
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.values import Interval, Latency, SavedBatch, SavedFigure, Session

SCHEMA = 2
"""Raised whenever an older release could misread what is written. No other schema is read."""

_ARMS = ("eager", "compiled", "replay")

_RESTORE = "restore the file, or remove the records of this entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A whole baseline file: its entries, and what it says of the machine and commit that wrote it last."""

    entries: Mapping[Key, SavedBatch] = field(default_factory=dict)
    machine_info: Mapping[str, Any] = field(default_factory=dict)
    commit_info: Mapping[str, Any] = field(default_factory=dict)


def parse(text: str, origin: str) -> Content:
    """Read a file's text; ``origin`` names it in the message of a :class:`~pytest_cudagraph.errors.BaselineError`."""
    document = _document(text, origin)
    arms: dict[Key, dict[str, Mapping[str, Any]]] = {}
    for number, record in enumerate(document["benchmarks"], start=1):
        _sort_in(arms, record, f"{origin}: record {number}")
    return Content(
        entries={key: _entry(key, found, origin) for key, found in arms.items()},
        machine_info=document.get("machine_info", {}),
        commit_info=document.get("commit_info", {}),
    )


def _document(text: str, origin: str) -> Mapping[str, Any]:
    try:
        document = parse_json(text)
    except ValueError as exc:
        remedy = "restore it, or remove it and save anew with --cudagraph-update"
        if "<<<<<<<" in text:
            remedy = "it holds unresolved merge conflicts: keep one side of each"
        raise BaselineError(f"{origin}: not valid JSON ({exc}); {remedy}") from exc
    if not isinstance(document, dict) or not isinstance(document.get("benchmarks"), list) or not document["benchmarks"]:
        raise BaselineError(f"{origin}: {_not_a_baseline(document)}")
    return document


def _not_a_baseline(document: Any) -> str:
    if isinstance(document, dict) and document.keys() >= {"schema", "tests"}:
        return (
            "a document of --cudagraph-json, which pytest-cudagraph report shows, and no baseline; "
            "--cudagraph-update writes baselines, to .cudagraph"
        )
    return (
        "not a baseline of pytest-cudagraph (it holds no records); --cudagraph-update writes baselines, to .cudagraph"
    )


def _sort_in(arms: dict[Key, dict[str, Mapping[str, Any]]], record: Any, origin: str) -> None:
    try:
        ours = record["extra_info"]["cudagraph"]
        schema = fields.whole(ours, "schema", least=1)
    except (KeyError, TypeError, ValueError) as exc:
        raise BaselineError(f"{origin} was not written by pytest-cudagraph: keep it elsewhere") from exc
    if schema != SCHEMA:
        remedy = "upgrade pytest-cudagraph" if schema > SCHEMA else "save it anew with --cudagraph-update"
        raise BaselineError(f"{origin} has schema {schema}, this pytest-cudagraph reads schema {SCHEMA}: {remedy}")
    try:
        key, arm = (fields.text(ours, "name"), fields.whole(ours, "batch_size", least=1)), _ARMS.index(ours["arm"])
    except (KeyError, ValueError) as exc:
        raise BaselineError(f"{origin} lacks a name, a batch size or an arm ({', '.join(_ARMS)})") from exc
    if arms.setdefault(key, {}).setdefault(_ARMS[arm], record) is not record:
        raise BaselineError(f"{origin} repeats {key[0]}, batch {key[1]}, {_ARMS[arm]}: keep one of the two")


def _entry(key: Key, arms: Mapping[str, Mapping[str, Any]], origin: str) -> SavedBatch:
    missing = [arm for arm in ("eager", "replay") if arm not in arms]
    if missing:
        raise BaselineError(f"{_place(key, origin)} has no record of {' and '.join(missing)}; {_RESTORE}")
    try:
        return _built(*key, arms)
    except (KeyError, TypeError, ValueError) as exc:
        # Whatever a hand-edited record lacks or holds too much of, its reader needs one sentence that names the place.
        reason = f"no {exc}" if isinstance(exc, KeyError) else str(exc)
        raise BaselineError(f"{_place(key, origin)} is damaged ({reason}); {_RESTORE}") from exc


def _place(key: Key, origin: str) -> str:
    return f"{origin}: {key[0]}, batch {key[1]}"


def _built(name: str, batch_size: int, arms: Mapping[str, Mapping[str, Any]]) -> SavedBatch:
    ours = arms["replay"]["extra_info"]["cudagraph"]
    speedup = fields.mapping(ours, "speedup")
    return SavedBatch(
        name=name,
        batch_size=batch_size,
        eager=_latency(arms["eager"]),
        replay=_latency(arms["replay"]),
        compiled=_latency(arms["compiled"]) if "compiled" in arms else None,
        speedup=Interval(**{key: fields.number(speedup, key) for key in ("estimate", "low", "high")}),
        kernels=None if ours["kernels"] is None else fields.whole(ours, "kernels"),
        kernel_names=_counts(fields.mapping(ours, "kernel_names")),
        device=fields.device(fields.mapping(ours, "device")),
        saved_at=fields.text(ours, "saved_at"),
        sessions=_sessions(ours["sessions"]),
    )


def _counts(found: Mapping[str, Any]) -> dict[str, int]:
    return {name: fields.whole(found, name) for name in found}


def _sessions(found: Any) -> tuple[Session, ...]:
    if not isinstance(found, list) or not found:
        raise ValueError(f"sessions must be a list of at least one session, not {value_text(found)}")
    return tuple(_session(each) for each in found)


def _session(found: Mapping[str, Any]) -> Session:
    return Session(
        date=fields.text(found, "date"),
        commit=fields.text(found, "commit"),
        software=fields.text(found, "software"),
        q25_ns=fields.nanoseconds(found, "q1"),
        median_ns=fields.nanoseconds(found, "median"),
        reference_q25_ns=fields.nanoseconds(found, "reference_q1") if "reference" in found else None,
        reference_median_ns=fields.nanoseconds(found, "reference") if "reference" in found else None,
        unrest_log=_unrest(found),
        figures=_figures(fields.mapping(found, "figures")) if "figures" in found else {},
    )


def _figures(found: Mapping[str, Any]) -> dict[str, SavedFigure]:
    return {name: _figure(fields.mapping(found, name)) for name in found}


def _figure(found: Mapping[str, Any]) -> SavedFigure:
    return SavedFigure(
        q25_ns=fields.nanoseconds(found, "q1"),
        median_ns=fields.nanoseconds(found, "median"),
        unrest_log=_unrest(found),
    )


def _unrest(found: Mapping[str, Any]) -> float:
    return fields.log_ratio(found, "unrest") if "unrest" in found else 0.0


def _latency(record: Mapping[str, Any]) -> Latency:
    stats = fields.mapping(record, "stats")
    return Latency(
        samples=fields.whole(stats, "rounds", least=1),
        minimum_ns=fields.nanoseconds(stats, "min"),
        q25_ns=fields.nanoseconds(stats, "q1"),
        median_ns=fields.nanoseconds(stats, "median"),
        q75_ns=fields.nanoseconds(stats, "q3"),
        q90_ns=fields.nanoseconds(record["extra_info"]["cudagraph"], "q90"),
    )

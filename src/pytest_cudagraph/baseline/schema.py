"""A baseline file read: pytest-benchmark's JSON schema, so that its tools and those built on it read our files too.

One record per name, batch size and arm. What pytest-benchmark has no place for stands under
``extra_info["cudagraph"]``. All times are seconds. :mod:`pytest_cudagraph.baseline.text` writes it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.files import parse_json
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.values import DeviceInfo, Interval, Latency, SavedBatch, SavedFigure, Session

Key: TypeAlias = tuple[str, int]
"""The name of a test (see :func:`~pytest_cudagraph.baseline.normal_name`) and a batch size."""

SCHEMA = 2
"""Raised whenever an older release could misread what is written. No other schema is read."""

_ARMS = ("eager", "compiled", "replay")

_RESTORE = "restore the file, or remove the records of this entry"

LEAST, MOST = 1e-30, 1e15
"""Of seconds and ratios: beyond any that was measured, and quotients of them still have a logarithm."""
_MOST_LOG = 30.0
"""Of the logarithm of a ratio: a factor of 10**13. The exponential of a larger one may be no number."""


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
        entries={key: _entry(key, record, origin) for key, record in arms.items()},
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
        schema = _whole(ours, "schema", least=1)
    except (KeyError, TypeError, ValueError) as exc:
        raise BaselineError(f"{origin} was not written by pytest-cudagraph: keep it elsewhere") from exc
    if schema != SCHEMA:
        remedy = "upgrade pytest-cudagraph" if schema > SCHEMA else "save it anew with --cudagraph-update"
        raise BaselineError(f"{origin} has schema {schema}, this pytest-cudagraph reads schema {SCHEMA}: {remedy}")
    try:
        key, arm = (_text(ours, "name"), _whole(ours, "batch_size", least=1)), _ARMS.index(ours["arm"])
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
    speedup, counts = _mapping(ours, "speedup"), _mapping(ours, "kernel_names")
    return SavedBatch(
        name=name,
        batch_size=batch_size,
        eager=_latency(arms["eager"]),
        replay=_latency(arms["replay"]),
        compiled=_latency(arms["compiled"]) if "compiled" in arms else None,
        speedup=Interval(**{key: _number(speedup, key) for key in ("estimate", "low", "high")}),
        kernels=None if ours["kernels"] is None else _whole(ours, "kernels"),
        kernel_names={name: _whole(counts, name) for name in counts},
        device=_device(tuple(_mapping(ours, "device").items())),
        saved_at=_text(ours, "saved_at"),
        sessions=_sessions(ours["sessions"]),
    )


def _sessions(record: Any) -> tuple[Session, ...]:
    if not isinstance(record, list) or not record:
        raise ValueError(f"sessions must be a list of at least one session, not {value_text(record)}")
    return tuple(_session(each) for each in record)


def _session(record: Mapping[str, Any]) -> Session:
    figures = _mapping(record, "figures") if "figures" in record else {}
    return Session(
        date=_text(record, "date"),
        commit=_text(record, "commit"),
        software=_text(record, "software"),
        q25_ns=_nanoseconds(record, "q1"),
        median_ns=_nanoseconds(record, "median"),
        reference_q25_ns=_nanoseconds(record, "reference_q1") if "reference" in record else None,
        reference_median_ns=_nanoseconds(record, "reference") if "reference" in record else None,
        unrest_log=_unrest(record),
        figures={name: _figure(_mapping(figures, name)) for name in figures},
    )


def _figure(record: Mapping[str, Any]) -> SavedFigure:
    return SavedFigure(
        q25_ns=_nanoseconds(record, "q1"),
        median_ns=_nanoseconds(record, "median"),
        unrest_log=_unrest(record),
    )


def _unrest(record: Mapping[str, Any]) -> float:
    return _log_ratio(record, "unrest") if "unrest" in record else 0.0


def _latency(record: Mapping[str, Any]) -> Latency:
    stats = _mapping(record, "stats")
    return Latency(
        samples=_whole(stats, "rounds", least=1),
        minimum_ns=_nanoseconds(stats, "min"),
        q25_ns=_nanoseconds(stats, "q1"),
        median_ns=_nanoseconds(stats, "median"),
        q75_ns=_nanoseconds(stats, "q3"),
        q90_ns=_nanoseconds(record["extra_info"]["cudagraph"], "q90"),
    )


def _number(record: Mapping[str, Any], key: str) -> float:
    """A positive number. Raises :class:`KeyError` or :class:`ValueError`, as all of these do."""
    value = record[key]
    if type(value) not in (float, int) or not LEAST < value < MOST:
        raise _error(key, "a positive number", value)
    return float(value)


def _log_ratio(record: Mapping[str, Any], key: str) -> float:
    """The logarithm of a ratio above 1 that a machine can have."""
    value = _number(record, key)
    if value > _MOST_LOG:
        raise _error(key, f"at most {_MOST_LOG:g}", value)
    return value


def _nanoseconds(record: Mapping[str, Any], key: str) -> float:
    """A latency that a file holds in seconds, without the ``...0000001`` of the product."""
    product = _number(record, key) * 1e9
    # Four digits: from 10 µs on a whole number, which is quickly rounded.
    return float(round(product)) if product > 1e4 else round(product, 6)


def _whole(record: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    value = record[key]
    if type(value) is not int or value < least:
        raise _error(key, "a whole number", value)
    return value


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if type(value) is not str:
        raise _error(key, "a text", value)
    return value


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record[key]
    if type(value) is not dict:
        raise _error(key, "a mapping", value)
    return value


_TEXTS = ("kind", "name", "torch", "python", "host_cpu", "platform")
_OPTIONAL_TEXTS = ("driver", "cuda", "mig", "clocks")
"""Facts of a device."""


@lru_cache(maxsize=8)
def _device(items: tuple[tuple[str, Any], ...]) -> DeviceInfo:
    record = dict(items)
    texts: dict[str, Any] = {key: _text(record, key) for key in _TEXTS}
    texts |= {key: None if record.get(key) is None else _text(record, key) for key in _OPTIONAL_TEXTS}
    watts = None if record.get("power_limit_w") is None else _whole(record, "power_limit_w")
    return DeviceInfo(**texts, threads=_whole(record, "threads"), power_limit_w=watts)


def _error(what: str, allowed: str, value: Any) -> ValueError:
    return ValueError(f"{what} must be {allowed}, not {reprlib.repr(value)}")

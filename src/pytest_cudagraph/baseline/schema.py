"""A baseline as text: pytest-benchmark's JSON schema, so that its tools and those built on it read our files.

One record per name, batch size and arm; what pytest-benchmark has no place for stands under
``extra_info["cudagraph"]``. All times are seconds. A file is reviewed in pull requests, hence sorted keys, a fixed
order of records, quantiles rather than samples, four significant digits, and a line for each session: reading a file
and writing it again gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pytest_cudagraph.baseline import fields
from pytest_cudagraph.baseline.history import history
from pytest_cudagraph.baseline.names import Key, last_part, parametrized
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.values import DeviceInfo, Interval, Latency, SavedBatch, Session

SCHEMA = 2
"""Raised whenever an older release could misread what is written. Schema 1 knew no sessions; it is read as one."""

_ARMS = ("eager", "compiled", "replay")

_SCHEMA_OF = "4.0.0"
"""The oldest pytest-benchmark with these fields; its files name their writer under ``version``."""

_IQR_PER_SIGMA = 1.349
"""Interquartile range of a normal distribution in standard deviations: 2 * 0.6745."""

_ONE_LINE = "one line: "
_ONE_LINE_TEXT = re.compile(rf'^(\s+)("{_ONE_LINE}.*")(?=,?$)', re.MULTILINE)
"""How what stands on one line is carried through an encoder that spreads everything: as a text, alone in its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A whole baseline file: its entries, and what it says of the machine and commit that wrote it last."""

    entries: Mapping[Key, SavedBatch] = field(default_factory=dict)
    machine_info: Mapping[str, Any] = field(default_factory=dict)
    commit_info: Mapping[str, Any] = field(default_factory=dict)


def machine_info(device: DeviceInfo) -> dict[str, Any]:
    """The stable facts of a machine, under pytest-benchmark's keys where it has them."""
    return {
        "cpu": {"brand_raw": device.host_cpu},
        "python_version": device.python,
        "system": device.platform,
        "cudagraph": {key: getattr(device, key) for key in ("kind", "name", "driver", "cuda", "torch", "threads")},
    }


def text_of(content: Content) -> str:
    """The file's text. Raises :class:`ValueError` for a latency or ratio that is not a positive number."""
    ordered = [content.entries[key] for key in sorted(content.entries)]
    document = {
        "benchmarks": [record for entry in ordered for record in _records(entry)],
        "commit_info": dict(content.commit_info),
        "datetime": max((entry.saved_at for entry in ordered), default=""),
        "machine_info": dict(content.machine_info),
        "version": _SCHEMA_OF,
    }
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return _ONE_LINE_TEXT.sub(lambda found: found[1] + str(json.loads(found[2])).removeprefix(_ONE_LINE), text)


def _one_line(value: Mapping[str, Any]) -> str:
    return _ONE_LINE + json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def parse(text: str, origin: str) -> Content:
    """Read a file's text; ``origin`` names it in the message of a :class:`~pytest_cudagraph.errors.BaselineError`."""
    document = _json(text, origin)
    records = _mapping(document).get("benchmarks")
    if not isinstance(records, list) or not records:
        raise BaselineError(f"{origin}: {_not_a_baseline(_mapping(document))}")
    arms: dict[Key, dict[str, Mapping[str, Any]]] = {}
    for number, record in enumerate(records, start=1):
        _check_schema(record, f"{origin}: record {number}")
        _sort_in(arms, record, f"{origin}: record {number}")
    return Content(
        entries={key: _entry(key, found, origin) for key, found in arms.items()},
        machine_info=_mapping(document.get("machine_info")),
        commit_info=_mapping(document.get("commit_info")),
    )


def _json(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        mended = "restore it, or remove it and save anew with --cudagraph-update"
        if "<<<<<<<" in text:
            mended = "it holds unresolved merge conflicts: keep one side of each"
        reason = "nested too deeply" if isinstance(exc, RecursionError) else exc
        raise BaselineError(f"{origin}: not valid JSON ({reason}); {mended}") from exc


def _not_a_baseline(document: Mapping[str, Any]) -> str:
    if document.keys() >= {"schema", "tests"}:
        return (
            "a document of --cudagraph-json, which pytest-cudagraph report shows, and no baseline; "
            "--cudagraph-update writes baselines, to .cudagraph"
        )
    return (
        "not a baseline of pytest-cudagraph (it holds no records); --cudagraph-update writes baselines, to .cudagraph"
    )


def _check_schema(record: Any, origin: str) -> None:
    ours = _ours(record)
    schema = ours.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise BaselineError(f"{origin} was not written by pytest-cudagraph: keep it elsewhere")
    if schema > SCHEMA:
        raise BaselineError(
            f"{origin} has schema {schema}, this pytest-cudagraph reads up to {SCHEMA}: upgrade pytest-cudagraph"
        )


def _ours(record: Any) -> Mapping[str, Any]:
    return _mapping(_mapping(_mapping(record).get("extra_info")).get("cudagraph"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sort_in(arms: dict[Key, dict[str, Mapping[str, Any]]], record: Mapping[str, Any], origin: str) -> None:
    ours = _ours(record)
    name, batch_size, arm = ours.get("name"), ours.get("batch_size"), ours.get("arm")
    if not fields.is_text(name) or not fields.is_whole(batch_size, least=1) or arm not in _ARMS:
        raise BaselineError(f"{origin} lacks a name, a batch size or an arm ({', '.join(_ARMS)})")
    found = arms.setdefault((name, batch_size), {})
    if arm in found:
        raise BaselineError(f"{origin} repeats {name}, batch {batch_size}, {arm}: keep one of the two")
    found[arm] = record


def _records(entry: SavedBatch) -> list[dict[str, Any]]:
    latencies = {"eager": entry.eager, "compiled": entry.compiled, "replay": entry.replay}
    return [_record(entry, arm, latency) for arm, latency in latencies.items() if latency is not None]


def _record(entry: SavedBatch, arm: str, latency: Latency) -> dict[str, Any]:
    ours: dict[str, Any] = {"schema": SCHEMA, "name": entry.name, "batch_size": entry.batch_size, "arm": arm}
    ours["q90"] = fields.seconds(latency.q90_ns)
    if arm == "replay":
        ours |= {
            "device": asdict(entry.device),
            "kernel_names": dict(entry.kernel_names),
            "kernels": entry.kernels,
            "saved_at": entry.saved_at,
            "sessions": [_one_line(_session_record(session)) for session in history(entry)],
            "speedup": {
                key: fields.significant(fields.positive(value, key)) for key, value in asdict(entry.speedup).items()
            },
        }
    fullname = parametrized(entry.name, f"{entry.batch_size}-{arm}")
    return {
        "extra_info": {"cudagraph": ours},
        "fullname": fullname,
        "group": f"{entry.name} batch {entry.batch_size}",
        "name": last_part(fullname),
        "options": {},
        "param": f"{entry.batch_size}-{arm}",
        "params": {"arm": arm, "batch_size": entry.batch_size},
        "stats": _stats(latency),
    }


def _session_record(session: Session) -> dict[str, Any]:
    references = {"reference": session.reference_median_ns, "reference_q1": session.reference_q25_ns}
    unrest = {"unrest": fields.significant(session.unrest_log)} if session.unrest_log else {}
    return (
        unrest
        | {key: fields.seconds(value) for key, value in references.items() if value is not None}
        | {
            "commit": session.commit,
            "date": session.date,
            "median": fields.seconds(session.median_ns),
            "q1": fields.seconds(session.q25_ns),
            "software": session.software,
        }
    )


def _stats(latency: Latency) -> dict[str, Any]:
    """Their names, our quantiles: ``mean`` is the median, ``max`` the 90 % quantile, ``stddev`` is from the quartiles.

    A mean of latencies follows its outliers: between unchanged runs it moves ten times as far as the median.
    """
    low, median, high = (fields.seconds(value) for value in (latency.q25_ns, latency.median_ns, latency.q75_ns))
    least, most = fields.seconds(latency.minimum_ns), fields.seconds(latency.q90_ns)
    return {
        "hd15iqr": min(most, fields.significant(high + 1.5 * (high - low))),
        "iqr": fields.significant(high - low),
        "iterations": 1,
        "ld15iqr": max(least, fields.significant(low - 1.5 * (high - low))),
        "max": most,
        "mean": median,
        "median": median,
        "min": least,
        "ops": fields.significant(1 / median),
        "outliers": "n/a",
        "q1": low,
        "q3": high,
        "rounds": latency.samples,
        "stddev": fields.significant((high - low) / _IQR_PER_SIGMA),
        "total": fields.significant(median * latency.samples),
    }


def _entry(key: Key, arms: Mapping[str, Mapping[str, Any]], origin: str) -> SavedBatch:
    name, batch_size = key
    place = f"{origin}: {name}, batch {batch_size}"
    missing = [arm for arm in ("eager", "replay") if arm not in arms]
    if missing:
        raise BaselineError(
            f"{place} has no record of {' and '.join(missing)}; restore the file, or remove the records of this entry"
        )
    try:
        return _built(name, batch_size, arms)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        # Whatever a hand-edited record lacks or holds too much of, its reader needs one sentence that names the place.
        reason = f"no {exc}" if isinstance(exc, KeyError) else str(exc)
        raise BaselineError(
            f"{place} is damaged ({reason}); restore the file, or remove the records of this entry"
        ) from exc


def _built(name: str, batch_size: int, arms: Mapping[str, Mapping[str, Any]]) -> SavedBatch:
    ours = _ours(arms["replay"])
    speedup = fields.mapping(ours, "speedup")
    entry = SavedBatch(
        name=name,
        batch_size=batch_size,
        eager=_latency(arms["eager"]),
        replay=_latency(arms["replay"]),
        compiled=_latency(arms["compiled"]) if "compiled" in arms else None,
        speedup=Interval(**{key: fields.number(speedup, key) for key in ("estimate", "low", "high")}),
        kernels=None if ours["kernels"] is None else fields.whole(ours, "kernels"),
        kernel_names=fields.counts(fields.mapping(ours, "kernel_names")),
        device=fields.device(fields.mapping(ours, "device")),
        saved_at=fields.text(ours, "saved_at"),
        sessions=tuple(_session(each) for each in ours.get("sessions", ())),
    )
    return replace(entry, sessions=history(entry))


def _session(found: Mapping[str, Any]) -> Session:
    return Session(
        date=fields.text(found, "date"),
        commit=fields.text(found, "commit"),
        software=fields.text(found, "software"),
        q25_ns=fields.nanoseconds(found, "q1"),
        median_ns=fields.nanoseconds(found, "median"),
        reference_q25_ns=fields.nanoseconds(found, "reference_q1") if "reference" in found else None,
        reference_median_ns=fields.nanoseconds(found, "reference") if "reference" in found else None,
        unrest_log=fields.logarithm(found, "unrest") if "unrest" in found else 0.0,
    )


def _latency(record: Mapping[str, Any]) -> Latency:
    stats = fields.mapping(record, "stats")
    return Latency(
        samples=fields.whole(stats, "rounds", least=1),
        minimum_ns=fields.nanoseconds(stats, "min"),
        q25_ns=fields.nanoseconds(stats, "q1"),
        median_ns=fields.nanoseconds(stats, "median"),
        q75_ns=fields.nanoseconds(stats, "q3"),
        q90_ns=fields.nanoseconds(_ours(record), "q90"),
    )

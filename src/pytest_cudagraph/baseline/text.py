"""A baseline file written: sorted keys, a fixed order of records, four significant digits, one line for what changes
together: a session, the statistics of an arm, the speedup.

A file is reviewed in pull requests. Reading it (:mod:`pytest_cudagraph.baseline.schema`) and writing it again gives the
same bytes. The text is filled into templates, because ``json.dumps`` with ``indent`` takes six times as long: seconds
of each update for a file of 10,000 entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

from pytest_cudagraph.baseline.schema import LEAST, MOST, SCHEMA, Content, Key
from pytest_cudagraph.files import short_name
from pytest_cudagraph.values import DeviceInfo, Latency, SavedBatch, SavedFigure, Session

_SCHEMA_OF = "4.0.0"
"""The oldest pytest-benchmark with these fields; its files name their writer under ``version``."""

_IQR_PER_SIGMA = 1.349
"""Interquartile range of a normal distribution in standard deviations: 2 * 0.6745."""

_RECORD = """\
    {
      "extra_info": {
        "cudagraph": {
          "arm": "%(arm)s",
          "batch_size": %(batch_size)d,
%(graph)s          "name": %(test)s,
          "q90": %(q90)s,
%(saved_at)s          "schema": %(schema)d%(history)s
        }
      },
      "fullname": %(fullname)s,
      "group": %(group)s,
      "name": %(name)s,
      "options": {},
      "param": "%(batch_size)d-%(arm)s",
      "params": {
        "arm": "%(arm)s",
        "batch_size": %(batch_size)d
      },
      "stats": {\
"hd15iqr": %(hd15iqr)s, "iqr": %(iqr)s, "iterations": 1, "ld15iqr": %(ld15iqr)s, "max": %(q90)s, \
"mean": %(median)s, "median": %(median)s, "min": %(min)s, "ops": %(ops)s, "outliers": "n/a", "q1": %(q1)s, \
"q3": %(q3)s, "rounds": %(rounds)d, "stddev": %(stddev)s, "total": %(total)s}
    }"""

_GRAPH = """\
          "device": %(device)s,
          "kernel_names": %(kernel_names)s,
          "kernels": %(kernels)s,
"""
_SAVED_AT = """\
          "saved_at": %s,
"""
_HISTORY = """,
          "sessions": [
            %(sessions)s
          ],
          "speedup": {"estimate": %(estimate)s, "high": %(high)s, "low": %(low)s}"""
"""What the record of a replay holds beside."""

_LINES = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",\n            ", ": "))
"""Of a mapping of scalars below ``cudagraph``: one line each."""


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
    return records_text(content.entries) + about_text(content)


def records_text(entries: Mapping[Key, SavedBatch]) -> str:
    """The first part of the text: the entries."""
    ordered = [entries[key] for key in sorted(entries)]
    return '{\n  "benchmarks": [\n' + ",\n".join(record for entry in ordered for record in _records(entry)) + "\n  ]"


def about_text(content: Content) -> str:
    """The rest of the text: the machine and the commit that wrote it last."""
    commit = json.dumps(dict(content.commit_info), sort_keys=True, ensure_ascii=False, allow_nan=False)
    about = {
        "datetime": max((entry.saved_at for entry in content.entries.values()), default=""),
        "machine_info": dict(content.machine_info),
        "version": _SCHEMA_OF,
    }
    rest = json.dumps(about, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f',\n  "commit_info": {commit},{rest[1:]}\n'


def records_of(entry: SavedBatch) -> list[dict[str, Any]]:
    """The records of an entry, one for each arm, as a file holds them."""
    return [json.loads(record) for record in _records(entry)]


def _records(entry: SavedBatch) -> list[str]:
    latencies = {"eager": entry.eager, "compiled": entry.compiled, "replay": entry.replay}
    return [_record(entry, arm, latency) for arm, latency in latencies.items() if latency is not None]


def _record(entry: SavedBatch, arm: str, latency: Latency) -> str:
    fullname = parametrized(entry.name, f"{entry.batch_size}-{arm}")
    is_replay = arm == "replay"
    return _RECORD % {
        "schema": SCHEMA,
        "test": encode_basestring(entry.name),
        "batch_size": entry.batch_size,
        "arm": arm,
        "fullname": encode_basestring(fullname),
        "group": encode_basestring(f"{entry.name} batch {entry.batch_size}"),
        "name": encode_basestring(last_part(fullname)),
        "graph": _graph_text(entry) if is_replay else "",
        "saved_at": _SAVED_AT % encode_basestring(entry.saved_at) if is_replay else "",
        "history": _history_text(entry) if is_replay else "",
        **_stats(latency),
    }


def _graph_text(entry: SavedBatch) -> str:
    return _GRAPH % {
        "device": _device_text(entry.device),
        "kernel_names": _lines(entry.kernel_names),
        "kernels": "null" if entry.kernels is None else entry.kernels,
    }


@lru_cache(maxsize=8)
def _device_text(device: DeviceInfo) -> str:
    return _lines(asdict(device))


def _history_text(entry: SavedBatch) -> str:
    facts = {key: _positive_text(getattr(entry.speedup, key), key) for key in ("estimate", "high", "low")}
    return _HISTORY % {"sessions": ",\n            ".join(map(_session_text, entry.sessions)), **facts}


def _lines(values: Mapping[str, Any]) -> str:
    return f"{{\n            {_LINES.encode(values)[1:-1]}\n          }}" if values else "{}"


def _session_text(session: Session) -> str:
    reference, unrest = "", ""
    if session.reference_median_ns is not None and session.reference_q25_ns is not None:
        median = _seconds_text(session.reference_median_ns)
        reference = f'"reference": {median}, "reference_q1": {_seconds_text(session.reference_q25_ns)}, '
    if session.unrest_log:
        unrest = f', "unrest": {_digits(session.unrest_log)}'
    return (
        f'{{"commit": {encode_basestring(session.commit)}, "date": {encode_basestring(session.date)}, '
        f'{_figures_text(session.figures)}"median": {_seconds_text(session.median_ns)}, '
        f'"q1": {_seconds_text(session.q25_ns)}, {reference}'
        f'"software": {encode_basestring(session.software)}{unrest}}}'
    )


def _figures_text(figures: Mapping[str, SavedFigure]) -> str:
    if not figures:
        return ""
    texts = ", ".join(f"{encode_basestring(name)}: {_figure_text(each)}" for name, each in sorted(figures.items()))
    return f'"figures": {{{texts}}}, '


def _figure_text(figure: SavedFigure) -> str:
    unrest = f', "unrest": {_digits(figure.unrest_log)}' if figure.unrest_log else ""
    median, q25 = _seconds_text(figure.median_ns), _seconds_text(figure.q25_ns)
    return f'{{"median": {median}, "q1": {q25}{unrest}}}'


def _stats(latency: Latency) -> dict[str, Any]:
    """Their names, our quantiles: ``mean`` is the median, ``max`` the 90 % quantile, ``stddev`` is from the quartiles.

    A mean of latencies follows its outliers: between unchanged runs it moves ten times as far as the median.
    """
    quantiles = {
        "min": _seconds_text(latency.minimum_ns),
        "q1": _seconds_text(latency.q25_ns),
        "median": _seconds_text(latency.median_ns),
        "q3": _seconds_text(latency.q75_ns),
        "q90": _seconds_text(latency.q90_ns),
    }
    # From the rounded ones: reading and writing again gives the same.
    least, low, median, high, q90 = map(float, quantiles.values())
    iqr = high - low
    return quantiles | {
        "hd15iqr": _digits(min(q90, high + 1.5 * iqr)),
        "iqr": _digits(iqr),
        "ld15iqr": _digits(max(least, low - 1.5 * iqr)),
        "ops": _digits(1 / median),
        "rounds": latency.samples,
        "stddev": _digits(iqr / _IQR_PER_SIGMA),
        "total": _digits(median * latency.samples),
    }


def _seconds_text(nanoseconds: float) -> str:
    """A latency as a file holds it."""
    return _positive_text(nanoseconds / 1e9, "a latency")


def _positive_text(value: float, what: str) -> str:
    """A positive number as a file holds it."""
    if not LEAST < value < MOST:
        raise ValueError(f"{what} must be a positive number, not {value!r}")
    return _digits(value)


def _digits(value: float) -> str:
    """Four significant digits: 0.05 % at worst, far below what two runs of the same code differ by."""
    text = f"{value:.4g}"
    # As JSON spells it: not 1312 or 1.3e+04.
    return text if "." in text and "+" not in text else repr(float(text))


_SLUG_LENGTH = 80
"""File systems allow 255 bytes; temporary and lock files add to the name, and people read it."""

_LEGAL_MARKS = re.compile(r"\((?:r|tm|c)\)", re.IGNORECASE)


def normal_name(nodeid: str, name: str | None = None) -> str:
    """The name of a test in a baseline: the explicit ``name``, or the nodeid as pytest itself would say it.

    pytest-xdist up to 3.8 appends ``@group`` to nodeids under ``--dist loadgroup``; a baseline must not depend on that.
    """
    if name is not None:
        return name
    path, separator, test = nodeid.partition("::")
    return path + separator + _without_group(test)


def _without_group(test: str) -> str:
    # A Python name holds no "@", a parameter id in its brackets may: only an "@" outside of them starts a group.
    function, bracket, rest = test.partition("[")
    if "@" in function or not bracket:
        return function.partition("@")[0]
    parameters, closing, tail = rest.rpartition("]")
    return function + bracket + parameters + closing + tail.partition("@")[0]


def parametrized(name: str, parameters: str) -> str:
    """``test_a[8-replay]``, ``test_a[fp16-8-replay]``: as pytest names parametrised tests, for grouping by function."""
    return f"{name[:-1]}-{parameters}]" if name.endswith("]") else f"{name}[{parameters}]"


def last_part(fullname: str) -> str:
    """``test_a[8-replay]`` of ``tests/test_a.py::test_a[8-replay]``."""
    path, bracket, parameters = fullname.partition("[")
    return path.rpartition("::")[2] + bracket + parameters


def slug(device: DeviceInfo) -> str:
    """The file name of a device model, without its suffix: ``nvidia-h200``, ``cpu-amd-epyc-9b45``."""
    plain = _LEGAL_MARKS.sub(" ", device.name).lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
    prefix = "cpu-" if device.kind == "cpu" and words.split("-")[0] != "cpu" else ""
    return short_name(prefix + words, _SLUG_LENGTH)

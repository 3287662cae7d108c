"""The table's rows from a document that ``--cudagraph-json`` wrote, also from one of an earlier version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pytest_cudagraph.report.document import SCHEMA
from pytest_cudagraph.report.table import UNTIMED, Row, device_text
from pytest_cudagraph.units import to_ns
from pytest_cudagraph.values import DeviceInfo, Interval


def rows_of_document(found: Mapping[str, Any]) -> list[Row]:
    """The table's rows from a document. Raises :class:`ValueError` for what is not one of schema 1."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"not a document of schema {SCHEMA} as --cudagraph-json writes it")
    try:
        return [row for test in found["tests"] for row in _rows(test)]
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"damaged: {exc!r}") from exc


def device_of_document(found: Mapping[str, Any]) -> str:
    """The device of the run as :func:`device_text` shows it. Empty if nothing was measured."""
    device = found.get("device")
    if not isinstance(device, dict):
        return ""
    facts: dict[str, Any] = {each.name: device.get(each.name) for each in fields(DeviceInfo)}
    return device_text(DeviceInfo(**facts))


def _rows(test: Mapping[str, Any]) -> list[Row]:
    if not test["batches"]:
        # Documents of earlier versions have no judgements, here and below.
        reasons = [each["reason"] for each in test.get("judgements", ()) if each["verdict"] == test["verdict"]]
        errors = [finding["message"] for finding in test["findings"] if finding["level"] == "error"]
        note = next(iter([*reasons, *errors]), "")
        return [Row(test=test["name"], batch_size=None, word=test["verdict"].replace("-", " "), note=note)]
    return [_row(test["name"], batch) for batch in test["batches"]]


def _row(name: str, batch: Mapping[str, Any]) -> Row:
    verdict = batch["verdict"].replace("-", " ")
    untimed = batch["verdict"] in [verdict.value for verdict in UNTIMED]
    return Row(
        test=name,
        batch_size=int(batch["batch_size"]),
        # Documents of earlier versions have no word.
        word=batch.get("word", verdict),
        eager_ns=_judged_ns(batch["eager"]),
        compiled_ns=_judged_ns(batch["compiled"]),
        replay_ns=_judged_ns(batch["replay"]),
        speedup=interval_of(batch["speedup"]),
        min_speedup=None if batch["min_speedup"] is None else float(batch["min_speedup"]),
        note=(batch["reason"] or "") if untimed else _kernels_note(batch),
    )


def _kernels_note(batch: Mapping[str, Any]) -> str:
    """How the graph changed. Empty if it did not."""
    if batch["baseline"] is None or batch["baseline"]["kernels"] == batch["kernels"]:
        return ""
    return next((each["reason"] for each in batch.get("judgements", ()) if each["gate"] == "structure"), "")


def _judged_ns(latency: Mapping[str, Any] | None) -> float | None:
    if latency is None:
        return None
    # Documents of earlier versions have only the median of all samples.
    found = latency.get("judged", latency["median"])
    return None if found is None else to_ns(float(found))


def interval_of(speedup: Mapping[str, Any] | None) -> Interval | None:
    if speedup is None or speedup["estimate"] is None:
        return None
    # A bound is null if there were too few blocks for it.
    low, high = speedup["low"], speedup["high"]
    return Interval(
        estimate=float(speedup["estimate"]),
        low=0.0 if low is None else float(low),
        high=math.inf if high is None else float(high),
    )

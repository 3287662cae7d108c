"""A document that ``--cudagraph-json`` wrote, as the entries that a baseline would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_cudagraph.baseline import Key, fields, session_of_arm
from pytest_cudagraph.report.document_rows import interval_of, rows_of_document
from pytest_cudagraph.units import to_ns
from pytest_cudagraph.values import DeviceInfo, Latency, SavedBatch


def entries_of_document(found: Mapping[str, Any]) -> dict[Key, SavedBatch]:
    """What a run measured, by test and batch size, also where no baseline was written.

    Raises :class:`ValueError` for what is not a document of schema 1, and for one of an earlier version, which lacks
    the quartiles.
    """
    rows_of_document(found)
    try:
        device = None if found["device"] is None else fields.device(found["device"])
        pairs = [(test["name"], batch) for test in found["tests"] for batch in test["batches"]]
        timed = [(name, batch) for name, batch in pairs if batch["replay"] and batch["speedup"]]
        entries = [_entry(name, batch, device, found) for name, batch in timed if device]
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"damaged, or of an earlier version: {exc!r}") from exc
    return {(entry.name, entry.batch_size): entry for entry in entries}


def _entry(name: str, batch: Mapping[str, Any], device: DeviceInfo, document: Mapping[str, Any]) -> SavedBatch:
    replay, date = _latency(batch["replay"]), document.get("date") or ""
    reference = _latency(batch["reference"]) if batch["reference"] else None
    speedup = interval_of(batch["speedup"])
    if speedup is None:
        raise KeyError("speedup")
    return SavedBatch(
        name=name,
        batch_size=int(batch["batch_size"]),
        eager=_latency(batch["eager"]),
        replay=replay,
        compiled=_latency(batch["compiled"]) if batch["compiled"] else None,
        speedup=speedup,
        kernels=batch["kernels"],
        kernel_names={},
        device=device,
        saved_at=date,
        sessions=(session_of_arm(replay, reference, device.software, date=date[:10]),),
    )


def _latency(found: Mapping[str, Any]) -> Latency:
    names = ("minimum", "q25", "median", "q75", "q90")
    return Latency(samples=int(found["samples"]), **{f"{name}_ns": to_ns(float(found[name])) for name in names})

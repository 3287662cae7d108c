"""``tuned.json``: the best compile mode and graph for each batch size, by name, device and model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_cudagraph import files
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.state import modules_of
from pytest_cudagraph.values import DeviceInfo

_log = logging.getLogger("pytest_cudagraph.serving")

SCHEMA = 1
_LOCK_WAIT_S = 10.0


def device_key(device: DeviceInfo) -> str:
    """``cuda: NVIDIA H200``. Another driver or torch keeps the key."""
    return f"{device.kind}: {device.name}"


def fingerprint(model: Model) -> str:
    """``Sequential 6fa0c1d2``: the class, and a hash of the modules, and of names, shapes and types of their tensors.

    Values do not count: training on does not change what is fast.
    """
    lines = [getattr(model, "__qualname__", type(model).__qualname__)]
    for module in modules_of(model):
        lines += [f"{name} {type(part).__qualname__}" for name, part in module.named_modules()]
        tensors = (*module.named_parameters(), *module.named_buffers())
        lines += [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    return f"{lines[0]} {hashlib.sha256(chr(10).join(lines).encode(errors='replace')).hexdigest()[:8]}"


def save(path: Path, entry: Mapping[str, Any]) -> None:
    """Add or replace one entry, which has ``name``, ``device``, ``model`` and ``best_of``.

    Several processes may do so at once. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if the file cannot be
    read or written.
    """
    if not entry["best_of"]:
        raise CudagraphError(f"{path}: no combination of {entry['name']!r} was measured, so there is nothing to save")
    try:
        with FileLock(path.with_name(f".{files.short_name(path.name)}.lock"), timeout=_LOCK_WAIT_S):
            kept = [each for each in _entries(path) if _key(each) != _key(entry)]
            document = {"schema": SCHEMA, "tuned": sorted([*kept, entry], key=_key)}
            files.write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except Timeout as error:
        raise CudagraphError(f"{path}: another process has held its lock for {_LOCK_WAIT_S:.0f} s") from error
    except OSError as error:
        raise CudagraphError(f"{path}: cannot be written ({error.strerror}); nothing was changed") from error


def graph_sizes(path: Path, name: str, device: DeviceInfo, model: str) -> tuple[int, ...]:
    """The batch sizes whose best combination is a graph of the model itself.

    Raises :class:`~pytest_cudagraph.errors.InputError` if there is no such entry, or if compiled code was better.
    """
    combinations = best_of(path, name, device, model)
    compiled = sorted(
        {
            combination["compile"]
            for combination in combinations.values()
            if combination["graph"] and combination["compile"] != "none"
        }
    )
    if compiled:
        raise InputError(
            f"{path}: graphs of compiled code ({', '.join(compiled)}) are the best for {name!r}, and a GraphRunner "
            "captures the model itself: use create_integrated_compiler, or tune with compile=['none']"
        )
    sizes = tuple(sorted(size for size, combination in combinations.items() if combination["graph"]))
    if not sizes:
        raise InputError(f"{path}: no graph is the best for {name!r} at any batch size: serve the model itself")
    return sizes


def best_of(path: Path, name: str, device: DeviceInfo, model: str) -> dict[int, dict[str, Any]]:
    """The best combination of each batch size: ``compile`` and ``graph``.

    Another torch, Python or driver is logged. Raises :class:`~pytest_cudagraph.errors.InputError` if the file has no
    entry of this name, device and model.
    """
    entries = {_key(each): each for each in _read(path)}
    key = (name, device_key(device), model)
    if key not in entries:
        there = "; ".join(f"{each!r} ({what}) on {where}" for each, where, what in entries) or "none"
        raise InputError(
            f"{path} has no entry of {name!r} ({model}) on {key[1]}; found: {there}: run tune(...).save(path) there"
        )
    saved_with = entries[key].get("software")
    if saved_with != device.software:
        _log.warning("%s: %r was tuned with %s; here is %s: tune it again", path, name, saved_with, device.software)
    return {int(size): combination for size, combination in entries[key]["best_of"].items()}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return _entries(path, must_exist=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _entries(path: Path, *, must_exist: bool = False) -> list[dict[str, Any]]:
    if not must_exist and not path.exists():
        return []
    try:
        document = files.read_json(path)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not a file of schema {SCHEMA}")
        for each in document["tuned"]:
            _check(each)
        return list(document["tuned"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is no file of TuningReport.save ({type(error).__name__}: {error}); it was left as it is"
        ) from error


def _check(entry: Any) -> None:
    """Raise :class:`KeyError`, :class:`TypeError` or :class:`ValueError` for what is no entry."""
    _key(entry)
    for size, combination in entry["best_of"].items():
        if int(size) < 1 or not isinstance(combination["compile"], str) or not isinstance(combination["graph"], bool):
            raise ValueError(f"batch size {size}: {combination}")


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(entry["name"]), str(entry["device"]), str(entry["model"])

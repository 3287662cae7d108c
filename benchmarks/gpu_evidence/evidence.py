"""Evidence files: one per run on a GPU, rewritten after every step, so that a run cut short leaves what it has."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_cudagraph.values import is_emulated

SCHEMA = 1
_PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "pytest-benchmark", "nvidia-ml-py", "cuda-bindings")


class ForeignEvidence(Exception):
    """A file that is no evidence of a GPU; the message names it and says why."""


def versions() -> dict[str, str | None]:
    """Of Python and of what the figures depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def clocks(card: Any) -> list[dict[str, Any]]:
    """NVML's readings of each GPU over the run, one per step."""
    return [{**asdict(gpu), "slowdowns": list(gpu.slowdowns), "is_shared": gpu.is_shared} for gpu in card.gpus]


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    """The same with ``None`` for what is no finite number: JSON knows none, and one NaN must not cost the file."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> dict[str, Any]:
    """One file of a GPU; :class:`ForeignEvidence` for a rehearsal, an emulated device, another schema, or no JSON."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ForeignEvidence(f"{path.name}: cannot be read ({error})") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ForeignEvidence(f"{path.name}: not evidence of schema {SCHEMA}")
    if document.get("rehearsal") is not False or document.get("device", {}).get("kind") != "cuda":
        raise ForeignEvidence(f"{path.name}: a rehearsal on a CPU, which says nothing of a GPU")
    if is_emulated(str(document["device"].get("name"))):
        raise ForeignEvidence(f"{path.name}: of an emulated CUDA device, which is no GPU")
    return document


def files(folder: Path) -> Iterator[Path]:
    """Every evidence file: ``<device>/<date>-<tree>.json``."""
    yield from sorted(folder.glob("*/*.json"))


def newest(folder: Path) -> dict[str, Any] | None:
    """The latest run of all devices; None where there is none. Raises :class:`ForeignEvidence`."""
    documents = [read(path) for path in files(folder)]
    return max(documents, key=lambda document: str(document["began_at"]), default=None)

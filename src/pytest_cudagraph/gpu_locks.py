"""The GPUs of this machine and who has them: one lock file for each, in a folder of this user. It imports no torch.

A lock ends with its process. No GPU has run this code yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_cudagraph.environment import start_nvml, stop_nvml
from pytest_cudagraph.units import first_of
from pytest_cudagraph.values import GraphReport

_POLL_S = 1.0

_NAMED = 5
"""Models named in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """A GPU, or a part of one (MIG), that CUDA can be restricted to by its UUID."""

    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}, {short(self.uuid)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGpus:
    """GPUs that no other run takes until they are released."""

    gpus: tuple[VisibleGpu, ...]
    locks: tuple[FileLock, ...]

    def release(self) -> None:
        for lock in self.locks:
            lock.release()


def short(uuid: str) -> str:
    """``GPU-8932f937`` of a whole UUID."""
    return uuid[:12]


def measured_on(reports: Iterable[GraphReport]) -> list[str]:
    """Which GPU measured which models, a line for each GPU of several. No line without any."""
    names: dict[str, list[str]] = {}
    for report in sorted(reports, key=lambda report: report.gpu):
        names.setdefault(report.gpu, []).append(report.name)
    return [f"{short(gpu)} measured {first_of(measured, _NAMED)}" for gpu, measured in names.items() if gpu]


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs that CUDA may use in this process (``CUDA_VISIBLE_DEVICES``). Empty without a driver.

    A number counts GPUs as ``nvidia-smi`` does (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). A GPU in MIG mode is its parts.
    """
    nvml = start_nvml()
    if isinstance(nvml, str):
        return []
    try:
        cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
        parts = [[_gpu(nvml, handle) for handle in _parts(nvml, card)] or [_gpu(nvml, card)] for card in cards]
        uuids = [str(nvml.nvmlDeviceGetUUID(card)) for card in cards]
    except nvml.NVMLError:
        return []
    finally:
        stop_nvml(nvml)
    every = [gpu for card in parts for gpu in card]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None else list(_chosen(visible, every, dict(zip(uuids, parts, strict=True))))


def _gpu(nvml: Any, handle: Any) -> VisibleGpu:
    return VisibleGpu(uuid=str(nvml.nvmlDeviceGetUUID(handle)), name=str(nvml.nvmlDeviceGetName(handle)))


def _parts(nvml: Any, card: Any) -> Iterator[Any]:
    try:
        is_divided, _ = nvml.nvmlDeviceGetMigMode(card)
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(card)) if is_divided else 0
    except nvml.NVMLError:
        # GPUs without MIG do not support the question.
        return
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)


def _chosen(visible: str, every: Sequence[VisibleGpu], cards: dict[str, list[VisibleGpu]]) -> Iterator[VisibleGpu]:
    """As CUDA reads the list: numbers or beginnings of UUIDs, up to the first that names no GPU."""
    seen: set[VisibleGpu] = set()
    for word in (part.strip() for part in visible.split(",")):
        card = [gpus for number, (uuid, gpus) in enumerate(cards.items()) if word in (str(number), uuid)]
        named = [gpu for gpu in every if word and gpu.uuid.startswith(word)]
        gpu = card[0][0] if card else named[0] if len(named) == 1 else None
        if gpu is None or gpu in seen:
            return
        seen.add(gpu)
        yield gpu


def lock_folder() -> Path:
    """Where the locks of this user are, on every run alike."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pytest-cudagraph" / "gpus"


def take(gpus: Sequence[VisibleGpu], count: int, *, wait_s: float, on_wait: Callable[[], None]) -> TakenGpus | None:
    """Lock ``count`` of the GPUs, all or none of them. None if other runs hold too many for ``wait_s``.

    ``on_wait`` is called once before a wait. Raises :class:`OSError` if the locks cannot be written.
    """
    folder = lock_folder()
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait_s
    for attempt in range(int(wait_s / _POLL_S) + 1):
        taken = _take_free(gpus, count, folder)
        if len(taken.gpus) == count:
            return taken
        # Two runs that each hold some would wait for each other.
        taken.release()
        if time.monotonic() >= until:
            break
        if attempt == 0:
            on_wait()
        time.sleep(_POLL_S)
    return None


def _take_free(gpus: Sequence[VisibleGpu], count: int, folder: Path) -> TakenGpus:
    taken: list[tuple[VisibleGpu, FileLock]] = []
    for gpu in gpus:
        lock = FileLock(folder / f"{gpu.uuid}.lock")
        if len(taken) < count:
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
                taken.append((gpu, lock))
    return TakenGpus(gpus=tuple(gpu for gpu, _ in taken), locks=tuple(lock for _, lock in taken))

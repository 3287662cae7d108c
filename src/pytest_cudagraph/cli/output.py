"""The output of a command, its exit code, and the baseline files that commands read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudagraph import baseline
from pytest_cudagraph.errors import BaselineError, CudagraphError
from pytest_cudagraph.values import SavedBatch

FINE, REGRESSION, INCONCLUSIVE, USAGE = 0, 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """The lines of a command, and the exit code of the process."""

    lines: Sequence[str]
    exit_code: int = FINE


def baseline_files(folder: Path) -> list[Path]:
    """The baseline files of a folder. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if it is no folder."""
    if not folder.is_dir():
        raise CudagraphError(f"{folder} is not a folder")
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def entries_of(path: Path) -> dict[baseline.Key, SavedBatch]:
    """The entries of a file. Raises :class:`~pytest_cudagraph.errors.BaselineError`, also for a missing file."""
    if not path.exists():
        raise BaselineError(f"{path}: no such file")
    return dict(baseline.read(path).entries)


def kernels_text(kernels: int | None) -> str:
    """The count, or ``-`` if the backend could not count."""
    return "-" if kernels is None else str(kernels)

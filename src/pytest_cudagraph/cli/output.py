"""What a command says, how the process ends, and the files that commands read."""

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
    """The baseline files of a folder. Raises :class:`~pytest_cudagraph.errors.CudagraphError` where it is none."""
    if not folder.is_dir():
        raise CudagraphError(f"{folder} is not a folder")
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def entries_of(path: Path) -> dict[baseline.Key, SavedBatch]:
    """A file's entries. Raises :class:`~pytest_cudagraph.errors.BaselineError`, also where there is no file."""
    if not path.exists():
        raise BaselineError(f"{path}: no such file")
    return dict(baseline.read(path).entries)


def kernels_text(kernels: int | None) -> str:
    """A count, or ``-`` where the backend could not count."""
    return "-" if kernels is None else str(kernels)

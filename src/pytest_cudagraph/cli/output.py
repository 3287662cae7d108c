"""The output of a command and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudagraph import files
from pytest_cudagraph.errors import CudagraphError

FINE, REGRESSION, INCONCLUSIVE, USAGE = 0, 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """The lines of a command, and the exit code of the process."""

    lines: Sequence[str]
    exit_code: int = FINE


def write_page(path: Path, text: str) -> None:
    """Write an HTML page whole or not at all. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except (OSError, ValueError) as exc:
        # ValueError: a path with a null character.
        reason = getattr(exc, "strerror", None) or exc
        raise CudagraphError(f"{path}: the page could not be written ({reason}); nothing was changed") from exc

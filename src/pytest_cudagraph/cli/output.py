"""The output of a command and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINE, REGRESSION, INCONCLUSIVE, USAGE = 0, 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """The lines of a command, and the exit code of the process."""

    lines: Sequence[str]
    exit_code: int = FINE

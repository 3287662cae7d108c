"""Places in the user's code, and what the audit found there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """``model.py:20``; the path is relative where it lies below the working folder, as pytest shows it."""
        path, here = Path(self.file), Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One hazard seen in the eager model: a stable id of the catalogue, where, what was seen, what to do."""

    id: str
    level: Level
    message: str
    fix: str
    evidence: str = ""
    site: Site | None = None
    loud: bool = True
    """Whether CUDA itself would refuse the capture (loud), or replay wrongly without a word (silent)."""
    called_from: Site | None = None
    """The innermost line of the user's project, where ``site`` lies in an installed library."""

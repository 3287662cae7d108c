"""The tables of ``docs/twin.md``: where the twin and CUDA disagree, the figures, the rows of the catalogue."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "twin.md"


class Disagreement(NamedTuple):
    """One line of the table; ``None`` where a stage says nothing."""

    module: str
    stage: str
    twin: str | None
    cuda: str | None
    why: str


@functools.cache
def disagreements():
    return tuple(Disagreement(*map(_word, cells[:4]), cells[4]) for cells in _table("Where the twin and CUDA disagree"))


@functools.cache
def rows():
    """Per number of the catalogue: the names of its modules and test files, and what stands there in words."""
    return {
        int(number): (re.findall(r"`([\w./]+)`", where), where) for number, _, where in _table("The rows by number")
    }


def cuda_says(module, stage, otherwise):
    """What CUDA must say at a stage: what stands in the table, else what the twin says."""
    listed = {(each.module, each.stage): each.cuda for each in disagreements()}
    return listed.get((module, stage), otherwise)


def _table(heading):
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip().strip("|") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.split("|")) for line in lines[2:]]


def _word(cell):
    return None if cell == "nothing" else cell.strip("`")

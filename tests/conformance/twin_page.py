"""The tables of ``docs/twin.md``: what each witness says, the figures, the rows of the catalogue.

A witness is what a case runs on: the twin, the emulated CUDA device, a GPU. The page holds only where one differs from
the twin. ``GOLDEN=update`` writes what a run on CUDA has shown there. The reasons are written by hand.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.cases import CASES
from tests.conformance.models import clean, loud, memory, quiet, silent, sizes
from tests.conformance.stages import STAGES, outcome

from pytest_cudagraph.device import EMULATED, why_no_gpu

MODELS = (clean, loud, memory, quiet, silent, sizes)
"""The modules whose import fills ``CASES``."""
PAGE = Path(__file__).parents[2] / "docs" / "twin.md"
TWIN, EMULATED_CUDA, GPU = "the twin", "emulated CUDA", "a GPU"
NOT_SEEN = "not seen"
_HEADING = "Where the twin and CUDA disagree"
_TITLES = "| Modules | Stage | Twin | Emulated CUDA | GPU | Why |\n| --- | --- | --- | --- | --- | --- |\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a stage says of one case, where a witness differs from the twin. ``None``: it says nothing."""

    module: str
    stage: str
    twin: str | None
    emulated: str | None
    gpu: str | None
    why: str

    def of(self, witness):
        """The word of a witness. A GPU that has not run is expected to say what the emulated device says."""
        seen = {TWIN: self.twin, EMULATED_CUDA: self.emulated, GPU: self.gpu}[witness]
        return self.emulated if seen == NOT_SEEN else seen

    @property
    def is_one(self):
        return self.emulated != self.twin or self.gpu not in (self.twin, NOT_SEEN)

    @property
    def cells(self):
        """All cells but the first. Modules with equal cells share a row."""
        return (*map(_cell, (self.stage, self.twin, self.emulated, self.gpu)), self.why)


def witness_of(kind):
    """The witness that runs the backend ``kind`` on this machine."""
    if kind == "cpu":
        return TWIN
    return EMULATED_CUDA if why_no_gpu() == EMULATED else GPU


def is_updating(witness):
    """Whether this run writes into the page what the witness says. The twin's words are those of the cases."""
    return witness != TWIN and os.environ.get("GOLDEN") == "update"


def wanted(case, witness, found=None):
    """What each stage must say. A model that raises by itself, or is not captured, comes to no later stage."""
    found, expected = differences() if found is None else found, case.expected
    said = {"eager": None, "audit": expected.audit, "capture": expected.capture, "check": expected.check}
    said.update({stage: found[case.name, stage].of(witness) for stage in STAGES if (case.name, stage) in found})
    return {**dict.fromkeys(STAGES), **{stage: said[stage] for stage in reached(said)}}


def reached(said):
    """The stages that a case comes to: not further than one that stops it."""
    stop = next((stage for stage in ("eager", "capture") if said[stage]), STAGES[-1])
    return STAGES[: STAGES.index(stop) + 1]


@functools.cache
def differences():
    """The table of the page, by module and stage."""
    found = {}
    for names, stage, twin, emulated, gpu, why in _table(_HEADING):
        for name in re.findall(r"`(\w+)`", names):
            words = {"twin": _word(twin), "emulated": _word(emulated), "gpu": _word(gpu)}
            found[name, _word(stage)] = Difference(module=name, stage=_word(stage), **words, why=why)
    return found


@functools.cache
def rows():
    """Per number of the catalogue: the names of its modules and test files, and what stands there in words."""
    return {
        int(number): (re.findall(r"`([\w./]+)`", where), where) for number, _, where in _table("The rows by number")
    }


def updated(witness, seen):
    """The differences after a run on CUDA. ``seen``: what each stage said, by the name of the case."""
    column = {EMULATED_CUDA: "emulated", GPU: "gpu"}[witness]
    found = dict(differences())
    for name, said in seen.items():
        twin = wanted(CASES[name], TWIN)
        for stage in STAGES:
            word = said[stage] if stage in reached(said) else twin[stage]
            other = {"emulated": twin[stage], "gpu": NOT_SEEN}
            new = Difference(module=name, stage=stage, twin=twin[stage], **other, why="")
            found[name, stage] = replace(found.get((name, stage), new), **{column: word})
    return {key: each for key, each in found.items() if each.is_one}


def page_with(found):
    """The text of the page with these differences, and with the figures that follow from them."""
    text = PAGE.read_text(encoding="utf-8")
    before, heading, after = text.partition(f"\n## {_HEADING}\n")
    section, following, rest = after.partition("\n## ")
    words = section.partition(_TITLES[:9])[0]
    text = before + heading + words + _TITLES + "".join(_lines(found)) + following + rest
    for witness in (TWIN, EMULATED_CUDA, GPU):
        line = f"* On {witness}: "
        text = re.sub(rf"(?m)^{re.escape(line)}.*$", line + figures(witness, found), text)
    return text


def figures(witness, found):
    """Found, missed, false alarms, clean; and how many cases are as on the twin."""
    if witness == GPU and any(each.gpu == NOT_SEEN for each in found.values()):
        return NOT_SEEN
    said = {case.name: wanted(case, witness, found) for case in CASES.values()}
    outcomes = Counter((case.is_hazard, outcome(case, said[case.name], case.expected.told)) for case in CASES.values())
    hazards = sum(case.is_hazard for case in CASES.values())
    alarms = outcomes[True, "false alarm"] + outcomes[False, "false alarm"]
    equal = sum(said[case.name] == wanted(case, TWIN, found) for case in CASES.values())
    text = f"{outcomes[True, 'found']} of {hazards} hazards found, {outcomes[True, 'missed']} missed, "
    text += f"{alarms} false alarms, {outcomes[False, 'clean']} of {len(CASES) - hazards} look-alikes clean"
    return text if witness == TWIN else f"{text}. {equal} of {len(CASES)} modules as on the twin"


def _lines(found):
    """One line per stage and words, in the order of the cases."""
    modules = {}
    for each in sorted(found.values(), key=lambda each: (list(CASES).index(each.module), STAGES.index(each.stage))):
        modules.setdefault(each.cells, []).append(f"`{each.module}`")
    return [f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in modules.items()]


def _table(heading):
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip().strip("|") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.split("|")) for line in lines[2:]]


def _word(cell):
    return None if cell == "nothing" else cell.strip("`")


def _cell(word):
    return "nothing" if word is None else word if word == NOT_SEEN else f"`{word}`"

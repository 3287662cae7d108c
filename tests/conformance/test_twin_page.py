"""``docs/twin.md`` says what is so: its figures, its disagreements and its rows are those of the suite."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.cases import CASES
from tests.conformance.example_models import EXAMPLES
from tests.conformance.models import clean, loud, memory, quiet, silent
from tests.conformance.planted import PLANTED
from tests.conformance.stages import outcome, seen
from tests.conformance.twin_page import PAGE, disagreements, rows

ROOT = Path(__file__).parents[2]
LAST_ROW = 52
SUITE = (clean, loud, memory, quiet, silent)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch lacks one of the hazards")
@pytest.mark.filterwarnings("default")
def test_the_figures_are_the_real_ones():
    of_hazards = Counter(outcome(case, seen(name, "cpu")) for name, case in CASES.items() if case.is_hazard)
    of_clean = Counter(outcome(case, seen(name, "cpu")) for name, case in CASES.items() if not case.is_hazard)
    alarms = of_hazards["false alarm"] + of_clean["false alarm"]
    figures = (
        f"{of_hazards['found']} of {of_hazards.total()} hazard modules found, {of_hazards['missed']} missed, "
        f"{alarms} false alarms, on {of_clean.total()} clean look-alikes none"
    )
    assert alarms == 0
    assert figures in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_the_number_of_architectures_is_the_real_one():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(ARCHITECTURES)} of `transformers`' architectures" in text
    assert f"all {len(ARCHITECTURES) * len(PLANTED)} bugs are caught" in text


def test_the_number_of_models_of_the_examples_is_the_real_one():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"the {len(EXAMPLES)} models that `examples/` makes" in text
    assert f"all {len(EXAMPLES) * len(PLANTED)} bugs in them are caught" in text


def test_what_is_missed_is_said_with_its_reason():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    missed = {name: case.missed for name, case in CASES.items() if case.missed}
    assert [name for name, why in missed.items() if f"`{name}`: {why}" not in text] == []
    assert [name for name in missed if outcome(CASES[name], seen(name, "cpu")) != "missed"] == []


def test_each_disagreement_is_of_a_case_and_is_one():
    for each in disagreements():
        if each.module == "UnsafeOperator" and each.module not in CASES:
            continue  # this torch has no such tag
        expected = CASES[each.module].expected
        said = {"eager": None, "audit": expected.audit, "capture": expected.capture, "check": expected.check}
        assert said[each.stage] == each.twin, each
        assert each.cuda != each.twin, each
        assert each.why, each
    named = [(each.module, each.stage) for each in disagreements()]
    assert len(named) == len(set(named))


def test_every_row_of_the_catalogue_names_its_modules_or_why_there_is_none():
    assert list(rows()) == list(range(1, LAST_ROW + 1))
    for number, (names, words) in rows().items():
        modules = {name for name in names if name in CASES}
        assert modules == {name for name, case in CASES.items() if number in case.rows}, number
        files = [name for name in names if name.endswith(".py")]
        assert all((ROOT / name).exists() for name in files), number
        assert modules or files or words.startswith(("needs a GPU", "does not arise")), number

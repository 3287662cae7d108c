"""``docs/twin.md`` says what is so: its figures, its differences and its rows are those of the suite."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.cases import CASES
from tests.conformance.example_models import EXAMPLES
from tests.conformance.planted import PLANTED
from tests.conformance.stages import STAGES, outcome
from tests.conformance.twin_page import (
    EMULATED_CUDA,
    GPU,
    PAGE,
    TWIN,
    differences,
    page_with,
    reached,
    rows,
    updated,
    wanted,
)

ROOT = Path(__file__).parents[2]
LAST_ROW = 53


NEEDS_ALL_CASES = pytest.mark.skipif(
    not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch lacks one of the hazards"
)


@NEEDS_ALL_CASES
def test_the_table_and_the_figures_are_those_of_the_run():
    """Each case is tested against the table. So the figures follow from the table and the cases."""
    page = page_with(differences())
    if os.environ.get("GOLDEN") == "update":
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "GOLDEN=update writes it"


def said(difference, witness):
    return wanted(CASES[difference.module], witness)


@NEEDS_ALL_CASES
def test_each_difference_is_one_and_has_its_reason():
    for each in differences().values():
        twin = wanted(CASES[each.module], TWIN)
        assert each.twin == twin[each.stage], each
        shown = {each.of(witness) for witness in (EMULATED_CUDA, GPU) if each.stage in reached(said(each, witness))}
        assert shown - {each.twin}, f"{each}: no witness comes to this stage and differs"
        assert each.why, f"{each.module}: write why {each.stage} differs"


def test_no_hazard_is_missed_and_no_look_alike_is_an_alarm_on_the_twin():
    outcomes = Counter(outcome(case, wanted(case, TWIN), case.expected.told) for case in CASES.values())
    assert (outcomes["false alarm"], outcomes["missed"]) == (0, 0)


def test_the_number_of_architectures_is_the_real_one():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(ARCHITECTURES)} of `transformers`' architectures" in text
    assert f"all {len(ARCHITECTURES) * len(PLANTED)} bugs are caught" in text


def test_the_number_of_models_of_the_examples_is_the_real_one():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"the {len(EXAMPLES)} models that `examples/` makes" in text
    assert f"all {len(EXAMPLES) * len(PLANTED)} bugs in them are caught" in text


def test_every_row_of_the_catalogue_names_its_modules_or_why_there_is_none():
    assert list(rows()) == list(range(1, LAST_ROW + 1))
    for number, (names, words) in rows().items():
        modules = {name for name in names if name in CASES}
        assert modules == {name for name, case in CASES.items() if number in case.rows}, number
        files = [name for name in names if name.endswith(".py")]
        assert all((ROOT / name).exists() for name in files), number
        assert modules or files or words.startswith(("needs a GPU", "does not arise")), number


def test_a_run_on_a_gpu_fills_its_column_and_a_difference_that_is_gone_loses_its_row():
    case = CASES["OnlyOnCuda"]
    refused, passed = (dict(wanted(case, witness)) for witness in (GPU, TWIN))
    assert refused != passed
    seen = updated(GPU, {case.name: refused})[case.name, "capture"]
    assert (seen.twin, seen.emulated, seen.gpu) == (None, "host-sync", "host-sync")
    assert updated(GPU, {case.name: passed})[case.name, "capture"].gpu is None
    assert (case.name, "capture") not in updated(EMULATED_CUDA, {case.name: passed})


def test_a_new_difference_has_a_row_without_a_reason():
    said = dict.fromkeys(STAGES) | {"check": "wrong"}
    new = updated(EMULATED_CUDA, {"MaskedFill": said})
    assert new.keys() - differences().keys() == {("MaskedFill", "check")}
    assert "| `MaskedFill` | `check` | nothing | `wrong` | not seen |  |\n" in page_with(new)


def test_what_counts_as_missed_on_cuda_alone_is_named():
    hazards = [case for case in CASES.values() if case.is_hazard]
    outcomes = {case.name: outcome(case, wanted(case, EMULATED_CUDA), case.expected.told) for case in hazards}
    missed = [name for name, each in outcomes.items() if each == "missed"]
    named = f"On CUDA {' and '.join(f'`{name}`' for name in missed)} count as missed."
    assert named in " ".join(PAGE.read_text(encoding="utf-8").split())

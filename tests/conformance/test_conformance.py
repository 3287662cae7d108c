"""Each module through the product's own order, on the twin and, where there is a CUDA device, on its graphs."""

from __future__ import annotations

import pytest
from tests.conformance.cases import CASES
from tests.conformance.stages import PROPERTY, is_marked, outcome, seen
from tests.conformance.twin_page import MODELS, is_updating, wanted, witness_of

pytestmark = pytest.mark.filterwarnings("default")


def params():
    """Every case; slow ones are marked."""
    for case in CASES.values():
        yield pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])


@pytest.mark.parametrize("case", [*params()])
def test_every_stage_says_what_it_must_at_the_marked_line(case, kind, record_property):
    found, witness = seen(case.name, kind), witness_of(kind)
    record_property(
        PROPERTY, (witness, case.name, outcome(case, found.words, found.warnings | found.notes), found.words)
    )
    assert is_updating(witness) or found.words == wanted(case, witness)
    assert found.eager or (found.warnings, found.notes) == (case.expected.warnings, case.expected.notes)
    for finding in found.audit.findings:
        assert finding.site is None or is_marked(finding.site), finding
        assert finding.site is not None or not (case.has_mark and finding.level != "note"), finding
    if found.refusal is not None:
        assert (found.refusal.site is not None) == case.has_mark
        assert found.refusal.site is None or is_marked(found.refusal.site)


def test_there_are_as_many_cases_as_were_promised():
    assert sum(case.is_hazard for case in CASES.values()) >= 60
    assert sum(not case.is_hazard for case in CASES.values()) >= 25


def test_each_case_lives_in_one_of_the_modules_that_are_collected():
    assert {case.source.__module__ for case in CASES.values()} == {module.__name__ for module in MODELS}

"""Graphs that a program captures itself: correct runners pass, and every planted fault is told with its cause."""

from __future__ import annotations

import pytest
from tests.gpu.own_graphs.faults import CORRECT, FAULTS

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.inputs import Example, batch_examples, with_draw
from pytest_cudagraph.own_graphs.proof import prove
from pytest_cudagraph.own_graphs.trial import Claim
from pytest_cudagraph.own_graphs.watch import graph_watch


def trouble_of(case):
    options = dict(case.options)
    sizes = options.pop("batch_sizes", (1, 2, 3, 4, 8))
    tolerance = Tolerance(rtol=options.pop("rtol", None), atol=options.pop("atol", None))
    example = Example(args=case.args, kwargs={})
    examples = with_draw(batch_examples(example, sizes), options.pop("draw", None), 0)
    claim = Claim(eager=case.eager, examples=examples, tolerance=tolerance, **options)
    with graph_watch() as watch:
        trouble, trials = prove(claim, case.make, watch)
    assert trials
    return trouble and trouble.finding


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_runner_has_no_finding(name):
    assert trouble_of(CORRECT[name]()) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told_by_its_cause(name):
    case = FAULTS[name]()
    finding = trouble_of(case)
    assert finding is not None
    assert finding.id in case.hazards, finding

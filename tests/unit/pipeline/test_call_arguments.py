"""Models that add to their dicts and lists, or take out of them: every call finds them as they were."""

from __future__ import annotations

import torch
from tests.unit.pipeline.test_model_run import run_of
from torch import nn

from pytest_cudagraph import pipeline
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.batch_timing import CallArguments
from pytest_cudagraph.values import Verdict


class Fills(nn.Module):
    """What it finds is what it was first given, or it fails."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch, seen):
        assert sorted(batch) == ["mask", "x"]
        assert not seen
        batch["h"] = self.layer(batch["x"]) * batch.pop("mask")
        seen.append(batch["h"])
        return batch["h"] * 2


def test_a_model_that_fills_its_dict_passes_and_the_users_own_is_left_alone():
    batch, seen = {"x": torch.randn(1, 4), "mask": torch.ones(1, 4)}, []
    with run_of(Fills().eval(), args=(batch, seen)) as run:
        report = pipeline.run_stages(run)
    # The batch sizes have no baseline yet; every other gate was passed.
    found = {judgement.gate: judgement.verdict for each in report.batches for judgement in each.judgements}
    assert {verdict for gate, verdict in found.items() if gate != "baseline"} == {Verdict.PASSED}
    assert [finding.id for finding in report.findings] == ["mutates-input"]
    assert (sorted(batch), seen) == (["mask", "x"], [])


def test_containers_are_made_anew_only_for_a_call_that_changes_them():
    x = torch.ones(2)
    given = CallArguments(Example(args=({"x": x},), kwargs={"parts": [1]}))
    first = given.args[0]
    assert not given.look()
    assert given.args[0] is first
    given.args[0]["h"] = x
    assert given.look()
    assert given.is_changed
    assert given.args[0] == {"x": x}
    given.kwargs["parts"][0] = 2
    assert given.look()
    assert given.kwargs == {"parts": [1]}

"""The messages of the gates of guided generation. They need no xgrammar."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import guided, guided_times, timing

from pytest_cudagraph.decoding.guided_results import DisallowedToken, GuidedOutput
from pytest_cudagraph.decoding.guided_run import judge_mask, judge_outputs, judge_overhead
from pytest_cudagraph.values import Verdict

LATE = DisallowedToken(row=1, position=3, token=34, shown="b'\"'", before='{"a', in_previous_mask=True)


def test_the_messages_of_the_gates(golden):
    cut = guided(outputs=(GuidedOutput(text="a", is_cut=True),) * 2)
    judgements = [
        judge_mask(None),
        judge_mask(LATE),
        judge_mask(replace(LATE, in_previous_mask=False)),
        judge_outputs(guided(), 0.5),
        judge_outputs(guided(), 1.0),
        judge_outputs(cut, 1.0),
        judge_outputs(guided(is_parsed=False), 1.0),
        *(overhead(decision) for decision in ("pass", "fail", "open")),
        judge_overhead(guided_times(), timing(), 0.05, "this process only measures"),
    ]
    lines = [
        "\n  ".join([f"{each.verdict.value}: {each.reason}", *each.evidence, *([each.remedy] if each.remedy else [])])
        for each in judgements
    ]
    golden("gate_guided.txt", "\n".join(lines))


def overhead(decision):
    return judge_overhead(guided_times(), replace(timing(), decision=decision), 0.05, "")


@pytest.mark.parametrize(("least", "verdict"), [(2 / 3, Verdict.PASSED), (0.67, Verdict.FAILED), (0, Verdict.PASSED)])
def test_the_share_is_of_the_completed_outputs(least, verdict):
    assert judge_outputs(guided(), least).verdict is verdict

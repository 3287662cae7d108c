"""Eager against graphs: each fault of an engine is found by its own gate, and no fault by none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.engines import CountingEngine
from tests.facts import CPU, H200, MODE_FAILURE, modes

from pytest_cudagraph import InputError, transformers_engine
from pytest_cudagraph.decoding.mark import DECODE
from pytest_cudagraph.decoding.modes import compare
from pytest_cudagraph.decoding.modes.compare import ModesRequest, ModesRun, fallback_notes, token_ids
from pytest_cudagraph.decoding.modes.mode_run import ModeRun, RowStamps
from pytest_cudagraph.decoding.modes.results import (
    EngineMode,
    ModeFailure,
    ModeTokens,
    judge_engine,
    judge_fallback,
    judge_mode_speed,
    judge_mode_tokens,
)
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.session.scenario_run import ScenarioContext
from pytest_cudagraph.settings.case import CallSettings, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.values import Interval

RAISED = ModeRun(mode=EngineMode(failure=MODE_FAILURE))
DIED = ModeRun(mode=EngineMode(failure=ModeFailure(stage="load", error="its process was killed", is_raised=False)))


def generated(itl_ns, replays=9, tokens=(1, 2, 3, 4), generations=5):
    row = RowStamps(start_ns=0, tokens=tokens, stamps_ns=tuple(5000 + itl_ns * at for at in range(4)))
    receipt = None if replays is None else GenerationReceipt(
        steps=9, replays=replays, eager={} if replays in (0, 9) else {"too many rows": 9 - replays}
    )  # fmt: skip
    return ModeRun(mode=EngineMode(load_ns=1, receipt=receipt), generations=[[row, row]] * generations)


EAGER = generated(2000, replays=0)


@pytest.fixture
def judged(monkeypatch):
    """The batch report of two modes that left this."""

    def judged(graphs, eager=EAGER, *, device=CPU, why_not="", min_speedup=1.5, **asked):
        left = iter([eager, graphs])
        monkeypatch.setattr(compare, "run_mode", lambda request, timeout_s: next(left))
        call = CallSettings(batch_sizes=[2], options={"output_lengths": [4]}, mark=DECODE, min_speedup=min_speedup)
        case = make_case("a.py::test_a", call, MarkSettings(), SimpleNamespace(
            batch_sizes=(1,), min_speedup=1.15, max_slowdown=0.1, compile="none", device="cpu", time_budget=1.0,
        ))  # fmt: skip
        context = SimpleNamespace(backend=SimpleNamespace(device="cpu"), device=device, why_not_judged=why_not)
        scene = ScenarioContext(case=case, device_context=context, progress=lambda line: None)
        return ModesRun(request=request(**asked), scene=scene).batch()

    return judged


def request(**rest):
    facts = {
        "engine": CountingEngine(), "prompts": [[1], [2]], "eager": {}, "graphs": {}, "allow_fallback": False,
        "allow_piecewise": False, "max_differing_rows": 0, "generations": 5, "timeout_s": 9.0,
    }  # fmt: skip
    return ModesRequest(**facts | rest)


@pytest.mark.parametrize(
    ("graphs", "asked", "found"),
    [
        (generated(1000), {}, "engine passed, fallback passed, tokens passed, speedup passed"),
        (generated(1900), {}, "engine passed, fallback passed, tokens passed, speedup failed"),
        (generated(1000, replays=None), {}, "engine passed, fallback not-judged, tokens passed, speedup passed"),
        (generated(1000, replays=7), {}, "engine passed, fallback not-captured, tokens passed"),
        (
            generated(1000, replays=7),
            {"allow_fallback": True},
            "engine passed, fallback passed, tokens passed, speedup passed",
        ),
        (generated(1000, tokens=(1, 2, 9, 4)), {}, "engine passed, fallback passed, tokens wrong"),
        (
            generated(1000, tokens=(1, 2, 9, 4)),
            {"max_differing_rows": 2},
            "engine passed, fallback passed, tokens passed, speedup passed",
        ),
        (RAISED, {}, "engine passed, fallback not-captured"),
        (RAISED, {"allow_fallback": True}, "engine passed, fallback passed, speedup not-judged"),
        (DIED, {}, "engine failed"),
        # A crash is no fallback: serving code cannot catch it.
        (DIED, {"allow_fallback": True}, "engine failed"),
        (
            generated(1000),
            {"why_not": "no GPU"},
            "engine passed, fallback passed, tokens passed, speedup not-judged",
        ),
    ],
)
def test_each_fault_has_its_gate(judged, graphs, asked, found):
    report = judged(graphs, **asked)
    assert ", ".join(f"{each.gate} {each.verdict.value}" for each in report.judgements) == found
    # What a gate before the speed refuses has no times.
    assert (report.scenario.speedup is None) == ("speedup" not in found or report.scenario.graphs.failure is not None)


def test_an_engine_that_fails_eagerly_is_not_loaded_with_graphs(judged):
    report = judged(None, eager=DIED)
    assert [each.verdict.value for each in report.judgements] == ["failed"]
    assert report.scenario.graphs == EngineMode()


def test_the_memory_that_torch_keeps_of_earlier_tests_is_left_to_the_engine(judged, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    judged(generated(1000))
    assert emptied == []
    judged(generated(1000), device=H200)
    assert emptied == [True]


def test_few_generations_decide_nothing(judged):
    report = judged(generated(1000, generations=4), eager=generated(2000, replays=0, generations=4))
    assert report.judgements[-1].verdict.value == "inconclusive"
    assert report.judgements[-1].remedy == "to decide: at least 5 generations (generations=)"


def test_an_allowed_fallback_is_noted(judged):
    assert fallback_notes(judged(generated(1000))) == ()
    assert fallback_notes(judged(RAISED)) == ()
    (note,) = fallback_notes(judged(RAISED, allow_fallback=True))
    assert note.startswith("fell back to eager: with graphs the engine does not load: RuntimeError: out of memory")


def test_an_eager_mode_that_replays_is_refused(judged):
    with pytest.raises(InputError, match="the eager mode runs without graphs; found 9 of 9 decode steps"):
        judged(generated(1000), eager=generated(1000))


def test_the_times_are_those_of_the_glossary(judged):
    mode = judged(generated(1000)).scenario.graphs
    assert (mode.times.generations, mode.times.ttft.median_ns, mode.times.itl.median_ns) == (5, 5000, 1000)
    assert mode.itl_medians_ns == (1000,) * 5
    # 2 rows of 4 tokens, the last one 8 µs after the request.
    assert mode.times.tokens_per_second == pytest.approx(8 / 8e-6)


def test_tokens_that_come_together_have_no_latency_to_judge(judged):
    row = RowStamps(start_ns=0, tokens=(1, 2, 3, 4), stamps_ns=(1000,) * 4)
    together = replace(generated(1000), generations=[[row, row]] * 5)
    assert judged(together).judgements[-1].reason == "speed was not measured in both modes"


def test_the_messages_of_the_gates(golden):
    found, wrong = modes(), ModeTokens(rows=4, differing_rows=2, row=1, position=7, expected=24, found=56)
    failed = modes(graphs=EngineMode(failure=MODE_FAILURE), tokens=None, speedup=None)
    some = replace(found.graphs, receipt=GenerationReceipt(steps=93, replays=90, eager={"batch 9 has no graph": 3}))
    piecewise = replace(
        found.graphs,
        receipt=GenerationReceipt(steps=93, replays=93, piecewise=31),
        output=("WARNING: setting cudagraph_mode=PIECEWISE",),
    )
    refused = {"allow_fallback": False, "allow_piecewise": False}
    slow = modes(speedup=Interval(estimate=1.2, low=1.1, high=1.25))
    judgements = [
        judge_engine(found, falls_back=False),
        judge_engine(failed, falls_back=False),
        *(judge_fallback(each, **refused) for each in (found, failed)),
        judge_fallback(failed, **refused | {"allow_fallback": True}),
        judge_fallback(modes(graphs=some), **refused),
        judge_fallback(modes(graphs=piecewise), **refused),
        judge_fallback(modes(graphs=piecewise), **refused | {"allow_piecewise": True}),
        judge_fallback(modes(graphs=EngineMode()), **refused),
        judge_fallback(modes(graphs=EngineMode(receipt=GenerationReceipt(steps=0, replays=0))), **refused),
        judge_mode_tokens(found.tokens, 0),
        judge_mode_tokens(wrong, 2),
        judge_mode_tokens(wrong, 1),
        judge_mode_tokens(replace(wrong, eager_repeats=False), 0),
        judge_mode_speed(found, 1.5, ""),
        judge_mode_speed(slow, 1.5, ""),
        judge_mode_speed(slow, 1.15, ""),
        judge_mode_speed(slow, 1.15, "rehearsal"),
        judge_mode_speed(failed, 1.15, ""),
    ]
    lines = []
    for each in judgements:
        lines += [f"{each.gate} {each.verdict.value}: {each.reason}", *(f"  {line}" for line in each.evidence)]
        lines += [f"  {each.remedy}"] if each.remedy else []
    golden("gate_engine_modes.txt", "\n".join(lines))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"engine": "vllm"}, "engine_modes takes an engine with name and load"),
        ({"engine": CountingEngine}, "engine_modes takes an engine with name and load"),
        ({"eager": ["enforce_eager"]}, "eager takes a mapping of the mode's arguments by name; found"),
        ({"graphs": {1: 2}}, "graphs takes a mapping of the mode's arguments by name; found"),
        ({"generations": 0}, "generations takes a whole number of at least 1; found 0"),
        ({"timeout_s": 0}, "timeout_s takes a number above 0"),
        ({"max_differing_rows": -1}, "max_differing_rows takes a whole number of at least 0; found -1"),
        ({"allow_fallback": "no"}, "allow_fallback takes "),
    ],
)
def test_a_bad_argument_is_refused(wrong, told):
    with pytest.raises(InputError, match=told):
        request(**wrong)


@pytest.mark.parametrize("prompts", [[], [[]], "text", ["text"], [[1.5]], [[-1]], [[True]], torch.zeros(2, 3), None, 3])
def test_prompts_are_token_ids(prompts):
    with pytest.raises(InputError, match="prompts are token ids"):
        token_ids(prompts)


def test_prompts_may_be_a_tensor_or_rows_of_different_lengths():
    assert token_ids(torch.tensor([[1, 2]])) == [[1, 2]]
    assert token_ids(((1, 2), [3])) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("factory", "max_length", "told"),
    [("make_model", 8, "module:function"), (3, 8, "module:function"), (dict, 3, "tokens"), (dict, True, "tokens")],
)
def test_what_makes_no_model_is_refused(factory, max_length, told):
    with pytest.raises(InputError, match=told):
        transformers_engine(factory, max_length=max_length)

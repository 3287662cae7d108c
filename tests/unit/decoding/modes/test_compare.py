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
from pytest_cudagraph.decoding.modes.gates import (
    judge_engine,
    judge_errors,
    judge_fallback,
    judge_mode_speed,
    judge_mode_tokens,
)
from pytest_cudagraph.decoding.modes.mode_run import ModeRun, RowStamps
from pytest_cudagraph.decoding.modes.results import EngineMode, ModeFailure, ModeTokens, RequestErrors
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.session.scenario_run import ScenarioContext
from pytest_cudagraph.settings.case import CallSettings, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.values import Interval, MeasuredBatch

RAISED = ModeRun(mode=EngineMode(failure=MODE_FAILURE))
DIED = ModeRun(mode=EngineMode(failure=ModeFailure(stage="load", error="its process was killed", is_raised=False)))


def generated(itl_ns, replays=9, tokens=(1, 2, 3, 4), generations=5, piecewise=0, **rest):
    row = RowStamps(start_ns=0, tokens=tokens, stamps_ns=tuple(5000 + itl_ns * at for at in range(4)))
    receipt = None if replays is None else GenerationReceipt(
        steps=9, replays=replays, piecewise=piecewise, eager={} if replays in (0, 9) else {"too many rows": 9 - replays}
    )  # fmt: skip
    return ModeRun(mode=EngineMode(load_ns=1, receipt=receipt, **rest), generations=[[row, row]] * generations)


ONE_OF_8 = RequestErrors(requests=8, failed=1, first="request 3: RuntimeError: no room")
EAGER = generated(2000, replays=0)


@pytest.fixture
def judged(monkeypatch):
    """The batch report of two modes that left this."""

    def judged(graphs, eager=EAGER, *, device=CPU, why_not="", min_speedup=1.5, **asked):
        judged.modes = []

        def run_mode(request, timeout_s):
            judged.modes.append("graphs" if request.load.graphs else "eager")
            return graphs if request.load.graphs else eager

        monkeypatch.setattr(compare, "run_mode", run_mode)
        call = CallSettings(batch_sizes=[2], options={"output_lengths": [4]}, mark=DECODE, min_speedup=min_speedup)
        case = make_case("a.py::test_a", call, MarkSettings(), SimpleNamespace(
            batch_sizes=(1,), min_speedup=1.15, max_slowdown=0.1, compile="none", device="cpu", time_budget=1.0,
        ))  # fmt: skip
        context = SimpleNamespace(
            backend=SimpleNamespace(device="cpu"), device=device, why_not_judged=why_not,
            measured_batch=lambda name, size, timing, receipt, figures: MeasuredBatch(timing=timing, receipt=receipt),
        )  # fmt: skip
        scene = ScenarioContext(case=case, device_context=context, progress=lambda line: None)
        return ModesRun(request=request(**asked), scene=scene).batch()

    return judged


def request(**rest):
    facts = {
        "engine": CountingEngine(), "prompts": [[1], [2]], "eager": {}, "graphs": {}, "allow_fallback": False,
        "allow_piecewise": False, "max_differing_rows": 0, "generations": 5, "rounds": 2, "requests": 0,
        "max_error_rate": 0.0, "timeout_s": 9.0,
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
        (generated(1000, piecewise=9), {}, "engine passed, fallback not-captured, tokens passed"),
        (
            generated(1000, piecewise=9),
            {"allow_piecewise": True},
            "engine passed, fallback passed, tokens passed, speedup passed",
        ),
        (
            generated(1000, errors=ONE_OF_8),
            {"requests": 8},
            "engine passed, fallback passed, tokens passed, errors failed",
        ),
        (
            generated(1000, errors=ONE_OF_8),
            {"requests": 8, "max_error_rate": 0.125},
            "engine passed, fallback passed, tokens passed, errors passed, speedup passed",
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
    judged_gates = [f"{each.gate} {each.verdict.value}" for each in report.judgements if each.gate != "baseline"]
    assert ", ".join(judged_gates) == found
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


@pytest.mark.parametrize(
    ("generations", "rounds", "remedy"),
    [
        (2, 2, "to decide: at least 5 generations (generations=)"),
        (9, 1, "to decide: at least 2 processes of each mode, in turn (rounds=)"),
    ],
)
def test_few_generations_or_processes_decide_nothing(judged, generations, rounds, remedy):
    eager = generated(2000, replays=0, generations=generations)
    found = judged(generated(1000, generations=generations), eager=eager, rounds=rounds).judged_by("speedup")
    assert (found.verdict.value, found.remedy) == ("inconclusive", remedy)


def test_the_processes_of_the_modes_run_in_turn_and_are_one_mode_each(judged):
    graphs = generated(1000, host_bytes=5, errors=ONE_OF_8, waited_ratio=0.01)
    report = judged(graphs, requests=8, max_error_rate=1.0, rounds=3)
    assert judged.modes == ["eager", "graphs"] * 3
    found = report.scenario.graphs
    assert (report.scenario.rounds, len(found.itl_medians_ns)) == (3, 15)
    assert found.receipt == GenerationReceipt(steps=27, replays=27)
    assert (found.errors.failed, found.errors.requests, found.host_bytes) == (3, 24, 5)


@pytest.mark.parametrize(
    ("graphs", "asked"),
    [(generated(1000), {"why_not": "no GPU"}), (generated(1000, replays=7), {}), (RAISED, {"allow_fallback": True})],
)
def test_what_is_decided_or_not_judged_needs_no_second_process(judged, graphs, asked):
    judged(graphs, **asked)
    assert judged.modes == ["eager", "graphs"]


@pytest.mark.parametrize(
    ("eager_waited", "graphs_waited", "verdict"),
    [
        (0.0, 0.0, "passed"),
        (0.2, 0.0, "passed"),
        (0.3, 0.0, "inconclusive"),
        (0.0, 0.9, "passed"),
        (None, None, "passed"),
    ],
)
def test_a_speedup_that_other_work_on_the_cores_explains_decides_nothing(judged, eager_waited, graphs_waited, verdict):
    eager = generated(2000, replays=0, waited_ratio=eager_waited)
    report = judged(generated(1000, waited_ratio=graphs_waited), eager=eager, min_speedup=1.5)
    assert report.judged_by("speedup").verdict.value == verdict


def test_a_slowdown_that_other_work_on_the_cores_explains_decides_nothing(judged):
    waited = generated(1900, waited_ratio=0.4)
    found = judged(waited, min_speedup=1.5).judged_by("speedup")
    assert found.verdict.value == "inconclusive"
    assert "graphs waited 40 % of its time for a core" in found.evidence


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
    assert (mode.times.generations, mode.times.ttft.median_ns, mode.times.itl.median_ns) == (10, 5000, 1000)
    assert mode.itl_medians_ns == (1000,) * 10
    # 2 rows of 4 tokens, the last one 8 µs after the request.
    assert mode.times.tokens_per_second == pytest.approx(8 / 8e-6)


def test_tokens_that_come_together_have_no_latency_to_judge(judged):
    row = RowStamps(start_ns=0, tokens=(1, 2, 3, 4), stamps_ns=(1000,) * 4)
    together = replace(generated(1000), generations=[[row, row]] * 5)
    assert judged(together).judged_by("speedup").reason == "speed was not measured in both modes"


def test_both_modes_are_the_arms_of_an_entry(judged):
    report = judged(generated(1000))
    assert report.has_entry
    timing = report.timing
    assert (timing.eager.median_ns, timing.replay.median_ns, timing.blocks) == (2000, 1000, 10)
    assert (timing.decision, timing.noise_ratio, timing.speedup) == ("pass", 0.0, report.speedup)
    # 20 generations, of which 10 take 11 µs and 10 take 8 µs.
    assert timing.measure_ns == 10 * 11_000 + 10 * 8_000
    assert list(report.figures) == ["ttft", "time_per_token"]
    assert not judged(RAISED, allow_fallback=True).has_entry


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
    counted = modes(
        eager=replace(found.eager, errors=replace(ONE_OF_8, failed=0, first="")),
        graphs=replace(found.graphs, errors=ONE_OF_8),
    )
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
        judge_errors(counted, 0.0),
        judge_errors(counted, 0.2),
        judge_mode_speed(found, 1.5, ""),
        judge_mode_speed(replace(found, rounds=1), 1.5, ""),
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
        ({"rounds": 0}, "rounds takes a whole number of at least 1; found 0"),
        ({"requests": -1}, "requests takes a whole number of at least 0; found -1"),
        ({"max_error_rate": 2}, "max_error_rate takes a fraction from 0 to 1"),
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

"""Only correct combinations win, every other one is named with its reason, and the result is saved and served."""

import itertools
import json
import logging
import random
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.facts import CPU
from torch import nn

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.errors import CudagraphError, ExpectationMissed, InconclusiveWarning, InputError
from pytest_cudagraph.pipeline import stages
from pytest_cudagraph.serving import tuned_file
from pytest_cudagraph.serving.fixtures import _lines
from pytest_cudagraph.serving.tuning import (
    Combination,
    MeasuredCombination,
    TuningReport,
    grid,
    measurement,
    tune,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A race may end after ten rounds."""
    monkeypatch.setattr(measurement, "_LEAST_NS", 0)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def tuned(given, *inputs, **options):
    options = {"batch_sizes": [1, 2], "device": "cpu", "time_budget_s": 0.4, **options}
    return tune(given, *(inputs or (torch.randn(1, 8),)), **options)


def reasons(report):
    return {
        (each.combination.batch_size, each.combination.graph): each.reason
        for each in report.combinations
        if each.reason
    }


def test_every_cell_is_measured_and_the_best_of_each_size_and_of_all_is_named():
    report = tuned(model())
    assert [each.combination for each in report.combinations] == [
        Combination(size, "none", graph) for size in (1, 2) for graph in (True, False)
    ]
    assert min(each.samples for each in report.combinations) >= 10
    assert set(report.best_of) == {1, 2}
    assert report.best in report.best_of.values()
    assert report.combinations[0].memory_bytes > report.combinations[1].memory_bytes == 0


class ReadsTheHost(nn.Module):
    def forward(self, x):
        return x / x.abs().max().item()


def test_a_model_that_cannot_be_captured_has_no_graph_cell():
    report = tuned(ReadsTheHost())
    assert reasons(report) == dict.fromkeys([(1, True), (2, True)], reasons(report)[1, True])
    assert reasons(report)[1, True].startswith("the audit found host-sync: ")
    assert not report.best.combination.graph


class WrongFromTwoRowsOn(nn.Module):
    """A capture sees another branch than a call."""

    def forward(self, x):
        y = x + 1.0
        return y * 1.5 if len(x) > 1 and is_capturing() else y


def test_a_cell_whose_replay_is_wrong_never_wins(monkeypatch):
    # The audit knows this hazard. The check must find it too.
    monkeypatch.setattr("pytest_cudagraph.serving.tuning.grid.PreparedGrid._hazard", lambda combinations: "")
    report = tuned(WrongFromTwoRowsOn())
    assert list(reasons(report)) == [(2, True)]
    assert "differs from eager" in reasons(report)[2, True]
    assert not report.best_of[2].combination.graph


def test_a_cell_that_runs_out_of_memory_is_named_and_the_others_go_on(monkeypatch):
    capture = grid.PreparedGrid._prepare

    def prepare(prepared, combination):
        if combination == (2, "none", True):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        capture(prepared, combination)

    monkeypatch.setattr(grid.PreparedGrid, "_prepare", prepare)
    report = tuned(model())
    assert reasons(report) == {(2, True): "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    assert report.best is not None


def test_compiled_code_that_differs_from_eager_never_wins(monkeypatch):
    from pytest_cudagraph.compile import Compiled
    from pytest_cudagraph.compile.compile_batches import CompiledBatch

    def compiled(given, examples, mode, backend, **options):
        call = given if mode == "none" else lambda x: given(x) * 1.01
        return Compiled(mode, {size: CompiledBatch(call=call, regions=None, compile_ns=0) for size in examples})

    monkeypatch.setattr("pytest_cudagraph.pipeline.stages.compile_model", compiled)
    report = tuned(model(), compile=["none", "inductor"], batch_sizes=[1])
    failed = [each for each in report.combinations if each.reason]
    assert [each.combination.compile for each in failed] == ["inductor", "inductor"]
    assert all("differs from eager" in each.reason for each in failed)
    assert report.best.combination.compile == "none"


def test_a_failed_compile_is_the_reason_of_both_of_its_cells_and_is_not_repeated(monkeypatch):
    def fail(given, examples, mode, backend, **options):
        if mode == "aot":
            tried.append(mode)
            raise CudagraphError("no compiler")
        return compile_model(given, examples, mode, backend, **options)

    tried, compile_model = [], stages.compile_model
    monkeypatch.setattr(stages, "compile_model", fail)
    report = tuned(model(), compile=["none", "aot"], batch_sizes=[1])
    assert [(each.combination.compile, each.reason) for each in report.combinations if each.reason] == [
        ("aot", "no compiler")
    ] * 2
    assert tried == ["aot"]


def test_a_constraint_on_memory_keeps_cells_out_of_the_race():
    report = tuned(model(), constraint=lambda ready: not ready.memory_bytes)
    assert list(reasons(report)) == [(1, True), (2, True)]
    assert reasons(report)[1, True].startswith("the constraint refuses it (memory ")


def disturbed(monkeypatch, told):
    """The device says what disturbed it, at each question. It is asked after each round."""

    @contextmanager
    def answers(backend):
        yield told

    monkeypatch.setattr(measurement, "_disturbance_of", answers)
    monkeypatch.setattr(measurement.HealthFilter, "is_due", lambda health, now_ns: True)


def test_rounds_of_a_throttled_gpu_are_discarded_and_said(monkeypatch):
    answers = itertools.cycle(["throttled (power cap)", "", ""])
    disturbed(monkeypatch, lambda: next(answers))
    report = tuned(model(), batch_sizes=[1], time_budget_s=5.0)
    assert min(each.samples for each in report.combinations) >= 10
    assert re.fullmatch(
        r"\d+ rounds discarded, because the device was disturbed: throttled \(power cap\)", report.notes[0]
    )


def test_a_cell_that_was_measured_on_a_throttled_gpu_only_never_wins(monkeypatch):
    disturbed(monkeypatch, lambda: "throttled (power cap)")
    report = tuned(model(), time_budget_s=0.1)
    assert (report.best, report.best_of, report.is_best_decided) == (None, {}, False)
    assert set(reasons(report).values()) == {"the device was disturbed all the time: throttled (power cap)"}


def test_without_any_ready_cell_there_is_no_best():
    report = tuned(model(), constraint=lambda ready: False)
    assert (report.best, report.is_best_decided, report.usage()) == (None, False, [])
    assert "not measured" in "\n".join(report.lines())


class Counts(nn.Module):
    """Ends with an index error after a few calls, unless its state is restored."""

    def __init__(self):
        super().__init__()
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(16, 8))

    def forward(self, x):
        self.cache.index_copy_(0, self.at.reshape(1), x[:1])
        self.at += 1
        return x + self.cache.sum()


def test_a_model_with_state_starts_each_sample_from_the_same_state_and_keeps_its_own():
    counts = Counts()
    report = tuned(counts, batch_sizes=[1])
    assert reasons(report) == {}
    assert counts.at.item() == 0
    assert report.best is not None


def fake_costs(monkeypatch, cost_of):
    def sample(own, combination):
        own.latencies_ns[combination].append(cost_of(combination))
        return own.cost(combination, cost_of(combination))

    monkeypatch.setattr(measurement.GridMeasurement, "_sample", sample)


def test_a_slow_cell_never_wins_and_is_named(monkeypatch):
    fake_costs(monkeypatch, lambda combination: 1.3 if combination == (2, "none", True) else 1.0)
    report = tuned(model())
    places = {(each.combination.batch_size, each.combination.graph): each.place for each in report.combinations}
    assert places[2, True] == "slower"
    assert (report.best.combination, report.is_best_decided) == (Combination(2, "none", False), True)
    assert "slower, 1.30x the best" in next(line for line in report.lines() if "  2  none      yes" in line)


def test_objectives_choose_by_latency_by_row_or_by_a_function(monkeypatch):
    fake = {1: 10.0, 2: 12.0}
    fake_costs(monkeypatch, lambda combination: fake[combination.batch_size])

    def best(objective):
        return tuned(model(), objective=objective, graph=[False]).best.combination.batch_size

    assert (best("latency"), best("throughput"), best(lambda size, ns: ns**size)) == (1, 2, 1)
    with pytest.raises(InputError, match=r"^an objective gives a finite number above 0; found -10\.0 for batch 1"):
        best(lambda size, ns: -ns)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compile": "none"}, "compile takes a list of 'none', 'inductor', 'aot'; found 'none'"),
        ({"compile": [["none"]]}, "compile takes a list of 'none', 'inductor', 'aot'; found [['none']]"),
        ({"graph": True}, "graph takes a list of True and False; found True"),
        ({"graph": []}, "graph takes a list of True and False; found []"),
        ({"objective": "best"}, "objective is 'latency', 'throughput' or a function; found 'best'"),
        ({"tolerance": "a"}, "tolerance is a fraction above 0 and below 1; found 'a'"),
        ({"tolerance": 0}, "tolerance is a fraction above 0 and below 1; found 0"),
        ({"time_budget_s": float("nan")}, "time_budget_s is a number of seconds above 0; found nan"),
    ],
)
def test_a_wrong_option_is_one_sentence(options, text):
    with pytest.raises(InputError) as caught:
        tuned(model(), **options)
    assert str(caught.value) == text


def test_an_error_of_the_model_itself_is_raised():
    def broken(x):
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        tuned(broken)


def story():
    def combination(size, mode, graph, place, us, reason=""):
        measured = {
            "latency_ns": us * 1e3, "cost": us * 1e3 / size, "samples": 40, "memory_bytes": 2048 * graph,
            "behind_logs": (0.0,) * 40,
        }  # fmt: skip
        return MeasuredCombination(
            combination=Combination(size, mode, graph), place=place, reason=reason, **(measured if place else {})
        )

    combinations = (
        combination(1, "none", True, "best", 11.3),
        combination(1, "none", False, "slower", 16.9),
        combination(1, "aot", True, None, 0, "capture refused: operation not permitted when stream is capturing"),
        combination(8, "none", True, "ties", 20.1),
        combination(8, "none", False, "undecided", 20.5),
        combination(8, "aot", True, "best", 20.0),
    )
    return TuningReport(
        name="classifier", device=CPU, objective="throughput", tolerance=0.02, combinations=combinations,
        best=combinations[5], is_best_decided=False, measure_ns=2.5e9, model=tuned_file.fingerprint(model()),
    )  # fmt: skip


def test_a_last_race_on_a_disturbed_device_is_the_reason_of_no_best_cell():
    (line,) = _lines(replace(story(), best=None))
    assert line == "tuned: classifier: nothing, for the device was disturbed in the race between the batch sizes"


def test_a_report_in_words(golden):
    golden("tuning/report.txt", "\n".join(story().lines()))


def test_a_saved_report_reads_as_reviewed_and_replaces_only_its_own_entry(tmp_path, golden):
    path = tmp_path / "tuned.json"
    replace(story(), name="other").save(path)
    story().save(path)
    story().save(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [each["name"] for each in found["tuned"]] == ["classifier", "other"]
    golden("tuning/tuned.json", json.dumps({**found, "tuned": found["tuned"][:1]}, indent=1))


def test_a_runner_has_the_sizes_at_which_a_graph_was_the_best(tmp_path):
    report = tuned(model(), batch_sizes=[1, 2, 4], name="ranker")
    best = {
        each.combination: replace(
            each, place="best" if each.combination.graph != (each.combination.batch_size == 4) else "slower"
        )
        for each in report.combinations
    }
    replace(report, combinations=tuple(best.values())).save(tmp_path / "tuned.json")
    with GraphRunner.tuned(tmp_path / "tuned.json", model(), torch.randn(1, 8), name="ranker", device="cpu") as run:
        assert run.batch_sizes == (1, 2)
        run(torch.randn(2, 8))
        assert run.statistics.hits == 1


def served(path, name="classifier"):
    GraphRunner.tuned(path, model(), torch.randn(1, 8), name=name, backend=open_backend("cpu"))


def test_a_file_that_does_not_help_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_cudagraph.serving.graph_runner.describe", lambda kind: CPU)
    path = tmp_path / "tuned.json"
    with pytest.raises(InputError, match=r"tuned\.json: cannot be read \(No such file or directory\)$"):
        served(path)
    story().save(path)
    with pytest.raises(
        InputError, match=r"has no entry of 'nobody' \(Sequential \w{8}\) on cpu: .*; found: 'classifier' \(Seq"
    ):
        served(path, name="nobody")
    with pytest.raises(InputError, match=r"graphs of compiled code \(aot\) are the best for 'classifier'"):
        served(path)
    no_graph = [each for each in story().combinations if not each.combination.graph]
    replace(story(), combinations=tuple(replace(each, place="best") for each in no_graph)).save(path)
    with pytest.raises(InputError, match="no graph is the best for 'classifier' at any batch size"):
        served(path)
    for text in ("", "[]", '{"schema": 1, "tuned": [{"name": "a"}]}', '{"schema": 2, "tuned": []}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=r"tuned\.json is no file of TuningReport\.save"):
            served(path)
        with pytest.raises(CudagraphError, match="it was left as it is"):
            story().save(path)
        assert path.read_text(encoding="utf-8") == text


def test_a_saved_best_that_another_cell_now_beats_is_an_expectation_missed(tmp_path, golden):
    path, now = tmp_path / "tuned.json", story()
    now.save(path)
    now.expect_best(path)
    # At batch 1 eager has become faster; at batch 8 the saved combination is refused now.
    combinations = [
        replace(each, cost=5_000.0, place="best") if each.combination == (1, "none", False)
        else replace(each, place="slower", behind_logs=(0.8,) * 40) if each.combination == (1, "none", True)
        else replace(each, place=None, cost=None, reason="the compiler is gone") if each.combination == (8, "aot", True)
        else replace(each, place="best") if each.combination == (8, "none", True)
        else each
        for each in now.combinations
    ]  # fmt: skip
    with pytest.raises(ExpectationMissed) as caught:
        replace(now, combinations=tuple(combinations), best=None).expect_best(path)
    golden("tuning/expect.txt", str(caught.value))


def test_a_report_without_a_best_cell_is_not_saved(tmp_path):
    with pytest.raises(
        CudagraphError, match="no combination of 'classifier' was measured, so there is nothing to save"
    ):
        replace(story(), combinations=()).save(tmp_path / "tuned.json")


def with_rounds(behind_logs, place="slower"):
    """The best of batch 1 is eager now, and the saved combination was behind it so far in the rounds of both."""
    ratio = sorted(behind_logs)[len(behind_logs) // 2]
    return replace(story(), combinations=tuple(
        replace(each, place="best", cost=10_000.0) if each.combination == (1, "none", False)
        else replace(each, place=place, cost=10_000.0 * (1 + ratio), behind_logs=tuple(behind_logs))
        if each.combination == (1, "none", True)
        else each
        for each in story().combinations
    ))  # fmt: skip


def test_what_a_few_noisy_rounds_make_look_worse_is_a_warning_and_no_failure(tmp_path):
    path, draw = tmp_path / "tuned.json", random.Random(1)
    story().save(path)
    with pytest.warns(
        InconclusiveWarning, match=r"costs 1\.\d+x as much as .*; 12 rounds do not prove it: give a larger"
    ):
        with_rounds([draw.gauss(0.08, 0.3) for _ in range(12)]).expect_best(path)
    with pytest.raises(ExpectationMissed, match="the saved best, batch 1"):
        with_rounds([draw.gauss(0.08, 0.03) for _ in range(200)]).expect_best(path)


def test_a_saved_result_is_of_one_model_and_another_torch_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pytest_cudagraph.serving.graph_runner.describe", lambda kind: CPU)
    path = tmp_path / "tuned.json"
    report = story()
    graph = replace(report, combinations=report.combinations[:2])
    graph.save(path)
    wider = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
    with pytest.raises(
        InputError, match=r"no entry of 'classifier' \(Sequential \w{8}\) on cpu: .*; found: 'classifier'"
    ):
        GraphRunner.tuned(path, wider, torch.randn(1, 8), name="classifier", backend=open_backend("cpu"))
    with caplog.at_level(logging.WARNING, "pytest_cudagraph.serving"):
        served(path)
        assert caplog.messages == []
        replace(graph, device=replace(CPU, torch="2.1.0")).save(path)
        served(path)
    assert re.search(r"was tuned with Python \S+ torch 2\.1\.0; here is Python .*: tune it again$", caplog.messages[0])


def test_another_model_of_the_same_class_keeps_its_own_entry(tmp_path):
    path = tmp_path / "tuned.json"
    story().save(path)
    replace(story(), model=tuned_file.fingerprint(nn.Sequential(nn.Linear(8, 9)))).save(path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["tuned"]) == 2
    trained = model()
    trained[0].weight.data.add_(1.0)
    assert tuned_file.fingerprint(trained) == story().model


class SlowClock:
    """A clock that only calls move."""

    time_ns, resolution_ns = 0, 1.0

    def now_ns(self):
        return self.time_ns

    cpu_time_ns = now_ns


@pytest.fixture
def slow(monkeypatch):
    """A model whose calls take 20 ms of a clock that nothing else moves."""
    clock = SlowClock()
    monkeypatch.setattr(measurement, "PerfCounterClock", lambda: clock)
    monkeypatch.setattr(measurement.time, "perf_counter_ns", clock.now_ns)

    def call(x):
        clock.time_ns += 20_000_000
        return x + 1

    return call


def test_a_time_budget_is_kept_with_fewer_readings_of_slow_calls(slow):
    report = tuned(slow, graph=[False], time_budget_s=1.5)
    assert report.measure_ns <= 1.6e9
    assert all(each.samples >= 10 for each in report.combinations)
    assert not any("time budget" in note for note in report.notes)


def test_a_time_budget_that_ten_rounds_exceed_is_told_before_the_first_round(slow, caplog):
    lines = []
    report = tuned(slow, graph=[False], time_budget_s=0.2, progress=lines.append)
    told = (
        "ten rounds of 2 combinations take some 0.4 s, more than the time budget of 0.2 s: tune fewer combinations, or "
        "give it more"
    )
    assert lines.index(told) < lines.index("measure batch 1")
    assert (report.notes[0], caplog.messages) == (told, [told])
    assert report.measure_ns < 1.4e9

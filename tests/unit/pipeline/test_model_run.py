"""The order of the stages, what ends a story, and that nothing is held after it."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_cudagraph import pipeline
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import EagerFailed, InputError
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.device_context import Reference
from pytest_cudagraph.pipeline.model_errors import fix_for, places_of
from pytest_cudagraph.settings.case import CallSettings, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.settings.options import OPTIONS, Settings
from pytest_cudagraph.values import DeviceInfo, Disagreement, Site, Verdict

DEFAULTS = Settings(**{option.setting: option.default for option in OPTIONS})
CPU = DeviceInfo(
    kind="cpu", name="a CPU", driver=None, cuda=None, torch="2", python="3", host_cpu="a CPU", platform="x", threads=1
)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x))


class Wrong(Mlp):
    """Seen by no rule: what it adds at capture is a number of its own."""

    recording = False

    def forward(self, x):
        return super().forward(x) + (1.0 if self.recording else 0.0)


def bench_of(judged=True, **facts):
    return pipeline.DeviceContext(
        backend=CpuBackend(),
        device=CPU,
        judged=judged,
        why_not="",
        saved={},
        elsewhere=(),
        baseline_file=Path("cpu.json"),
        clock=PerfCounterClock(),
        **facts,
    )


def run_of(model, device_context=None, batch_sizes=(1, 2), **call):
    case = make_case(
        "test_a.py::test_a",
        CallSettings(batch_sizes=batch_sizes, min_speedup=0.001, **call),
        MarkSettings(time_budget=1.0),
        DEFAULTS,
    )
    device_context = device_context or bench_of()
    subject = pipeline.prepare_model(case, device_context, model, (torch.randn(1, 4),), {}, 0)
    return pipeline.ModelRun(
        case, device_context, subject, cache_folder=Path, compile_timeout_s=60.0, progress=lambda line: None
    )


@pytest.fixture
def graphs(monkeypatch):
    """Weak references to every graph that was captured."""
    captured = []
    capture = pipeline.model_run.capture.capture_batches

    def watch(*args, **kwargs):
        captures = capture(*args, **kwargs)
        captured.extend(weakref.ref(graph) for graph in captures.graphs.values())
        return captures

    monkeypatch.setattr(pipeline.model_run.capture, "capture_batches", watch)
    return captured


def test_a_good_model_passes_every_stage():
    with run_of(Mlp().eval()) as story:
        report = pipeline.run_stages(story)
    assert report.verdict is Verdict.PASSED
    assert [batch.batch_size for batch in report.batches] == [1, 2]
    gates = [judgement.gate for judgement in report.at(1).judgements]
    assert gates == ["capture", "check", "structure", "speedup", "baseline"]


def test_a_story_leaves_model_and_generators_as_its_first_eager_calls_left_them():
    model = nn.Sequential(Mlp(), nn.Dropout(0.5)).train()
    twin = copy.deepcopy(model)
    with run_of(model, batch_sizes=[2, 4]) as story:
        examples = story.subject.examples
        torch.manual_seed(7)
        pipeline.run_stages(story)
    after = torch.get_rng_state()

    torch.manual_seed(7)
    with torch.inference_mode():
        for size in (2, 4):
            twin(*examples[size].args)
    assert torch.equal(after, torch.get_rng_state())
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("stage", ["check_replays", "time_batch"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_held_after_an_exception_in_a_stage(graphs, monkeypatch, stage, error):
    def fail(*args, **kwargs):
        raise error("in the stage")

    home = pipeline.model_run.check if stage == "check_replays" else pipeline.model_run
    monkeypatch.setattr(home, stage, fail)
    # What a line of the user's raises becomes a failure of the test.
    with pytest.raises((error, EagerFailed), match="in the stage"), run_of(Mlp().eval()) as story:
        pipeline.run_stages(story)
    assert len(graphs) == 2
    del story
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_a_wrong_replay_is_never_timed(monkeypatch):
    model = Wrong().eval()
    capture = pipeline.model_run.capture.capture_batches

    def captured(*args, **kwargs):
        model.recording = True
        try:
            return capture(*args, **kwargs)
        finally:
            model.recording = False

    monkeypatch.setattr(pipeline.model_run.capture, "capture_batches", captured)
    with run_of(model) as story:
        report = pipeline.run_stages(story)
    assert report.verdict is Verdict.WRONG
    assert all(batch.timing is None for batch in report.batches)


def test_a_hazard_ends_the_story_before_any_capture(graphs):
    with run_of(lambda x: x / x.max().item()) as story:
        report = pipeline.run_stages(story)
    assert report.verdict is Verdict.NOT_CAPTURED
    assert [finding.id for finding in report.findings if finding.level == "error"] == ["host-sync"]
    assert graphs == []


def test_a_model_that_computes_nothing_is_told_so():
    with run_of(lambda x: x) as story:
        report = pipeline.run_stages(story)
    (judgement,) = report.at(2).judgements
    assert judgement.reason == "the capture was refused: the graph is empty: the call launches nothing on the device"
    assert judgement.evidence == ()
    assert judgement.remedy == "fix: give the fixture a callable that computes on its inputs with torch"


def test_a_failed_compile_is_a_verdict():
    compiled = torch.compile(Mlp().eval(), backend="eager")
    with run_of(compiled, compile="inductor") as story:
        story.run_eager()
        story.compile()
        report = story.report()
    assert report.verdict is Verdict.NOT_CAPTURED
    assert report.judgements[0].gate == "compile"


class Keeps(nn.Module):
    """Computes once and keeps it: the audit, whose calls are alike, sees a cache that is filled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cached = None

    def forward(self, x):
        if self.cached is None or self.cached.shape != x.shape:
            self.cached = self.layer(x)
        return self.cached * 2


def test_a_wrong_replay_names_the_line_and_the_remedy():
    with run_of(Keeps().eval()) as story:
        report = pipeline.run_stages(story)
    (judgement,) = [each for each in report.at(1).judgements if each.verdict is Verdict.WRONG]
    line = inspect.getsourcelines(Keeps)[1] + 10
    site = Site(file=__file__, line=line, function="forward")
    assert f"assigned at {site} in forward: self.cached = self.layer(x)" in judgement.evidence
    assert judgement.remedy == "fix: write in place with copy_ instead of assigning a new tensor"


def test_a_difference_without_a_known_cause_has_a_remedy_too():
    found = Disagreement(batch_size=1, where="output", message="1 of 4 values differ")
    assert fix_for(found) == (
        "fix: let outputs depend on inputs and on tensors that are changed in place, and on nothing else; "
        "where the difference is rounding: rtol, atol"
    )
    assert places_of(found, Keeps()) == ()


def test_eager_failures_carry_the_models_own_error():
    def broken(x):
        raise ValueError("no such thing\nsecond line")

    message = "batch 1: eager raised ValueError: no such thing"
    with run_of(broken) as story, pytest.raises(EagerFailed, match=message) as error:
        pipeline.run_stages(story)
    assert isinstance(error.value.__cause__, ValueError)
    assert error.value.own is error.value.__cause__
    first, place, *rest = str(error.value).splitlines()
    assert re.fullmatch(r"batch 1: eager raised ValueError: no such thing \(.*test_model_run.py:\d+\)", first)
    assert re.fullmatch(r'  at .*test_model_run.py:\d+ in broken: raise ValueError\("no such thing.*', place)
    assert rest == ["  the model fails by itself, without any graph"]
    assert error.value.__cause__.__traceback__.tb_frame.f_code.co_name == "broken"


def test_a_measurement_reads_the_reference_and_what_the_operations_take():
    backend, clock = CpuBackend(), PerfCounterClock()
    with run_of(Mlp().eval(), bench_of(reference=Reference(backend, clock))) as story:
        timing = pipeline.run_stages(story).at(2).timing
    assert timing.reference.samples >= 10
    assert timing.busy_ns > 0


class Counting(nn.Module):
    """A buffer counts the calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return x + self.steps


def test_what_the_operations_take_is_read_from_the_same_step():
    model = Counting()
    with run_of(model) as story:
        pipeline.run_stages(story)
    assert model.steps == 2  # the two eager calls


def test_in_a_rehearsal_speed_is_measured_and_not_judged():
    with run_of(Mlp().eval(), bench_of(judged=False)) as story:
        report = pipeline.run_stages(story)
    assert report.verdict is Verdict.NOT_JUDGED
    assert report.at(1).timing.target_ratio is None


class OnMeta(CpuBackend):
    device = "meta"


def test_a_cpu_model_is_copied_to_the_device_and_left_alone():
    model = Mlp().eval()
    device_context = bench_of()
    object.__setattr__(device_context, "backend", OnMeta())
    subject = pipeline.prepare_model(run_of(model).case, device_context, model, (torch.randn(1, 4),), {}, 0)
    assert subject.eager is not model
    assert {tensor.device.type for tensor in subject.eager.parameters()} == {"meta"}
    assert subject.examples[2].args[0].device.type == "meta"
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


def test_inputs_on_another_device_than_the_model_are_refused():
    device_context = bench_of()
    object.__setattr__(device_context, "backend", OnMeta())
    with pytest.raises(InputError, match=r"args\[0\] is on cpu, but this run uses meta"):
        pipeline.prepare_model(run_of(Mlp()).case, device_context, Mlp().to("meta"), (torch.randn(1, 4),), {}, 0)

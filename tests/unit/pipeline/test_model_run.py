"""The order of the stages, what ends a run, and that nothing is held after it."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import facts
from torch import nn

from pytest_cudagraph import pipeline
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import EagerFailed, InputError
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.device_context import Reference
from pytest_cudagraph.pipeline.model_errors import fix_for, places_of
from pytest_cudagraph.report import failure_text
from pytest_cudagraph.settings.case import CallSettings, ModelCall, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS
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
    """Seen by no rule: it adds a number where it is captured."""

    def forward(self, x):
        return super().forward(x) + (1.0 if torch.cuda.is_current_stream_capturing() else 0.0)


def context_of(backend=None, **given):
    facts = {"device": CPU, "why_not_judged": "", "clock": PerfCounterClock()} | given
    return pipeline.DeviceContext(
        backend=backend or CpuBackend(), saved={}, elsewhere=(), baseline_file=Path("a.json"), **facts
    )


def measure_once(arms, *, rule, prepare, **options):
    """One call of each arm, and a timing that passes on any machine."""
    for arm in (arms.eager, arms.replay):
        if prepare is not None:
            prepare()
        arm()
    return replace(facts.timing(), target_ratio=rule.target_ratio)


def case_of(batch_sizes=(1, 2), **settings):
    call = CallSettings(batch_sizes=batch_sizes, min_speedup=0.001, **settings)
    return make_case("test_a.py::test_a", call, MarkSettings(time_budget=1.0), DEFAULTS)


def run_of(model, device_context=None, args=None, **settings):
    case, device_context = case_of(**settings), device_context or context_of(measure=measure_once)
    call = ModelCall(model=model, args=args or (torch.randn(1, 4),))
    return pipeline.ModelRun(
        case=case,
        device_context=device_context,
        model=pipeline.prepare_model(call, case, device_context.backend),
        cache_folder=Path,
        compile_timeout_s=60.0,
        progress=lambda line: None,
    )


class WatchedBackend(CpuBackend):
    """Keeps a weak reference to every graph that its pools capture."""

    def __init__(self):
        super().__init__()
        self.graphs = []

    def pool(self):
        pool = super().pool()
        capture = pool.capture

        def watched(*args, **kwargs):
            graph = capture(*args, **kwargs)
            self.graphs.append(weakref.ref(graph))
            return graph

        pool.capture = watched
        return pool


class ChangesAfter400(Mlp):
    """By a value that can be neither read nor set."""

    def __init__(self):
        super().__init__()
        self.scales = itertools.cycle([1.0] * 400 + [2.0] * 4000)

    def forward(self, x):
        return super().forward(x) * next(self.scales)


@pytest.mark.parametrize(("calls", "verdict"), [(1, Verdict.PASSED), (400, Verdict.WRONG)])
def test_what_differs_after_the_calls_of_the_measurement_is_wrong_and_has_no_time(calls, verdict):
    def measure(arms, *, prepare, **options):
        for _ in range(calls):
            arms.eager()
        return measure_once(arms, prepare=prepare, **options)

    with run_of(ChangesAfter400().eval(), context_of(measure=measure), batch_sizes=(1,)) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is verdict
    (batch,) = report.batches
    assert (batch.timing is None) == (verdict is Verdict.WRONG)


@pytest.mark.parametrize(("why", "seconds"), [("", 1.0), ("rehearsal", 0.5)])
def test_a_speed_that_is_not_judged_is_measured_for_half_a_second(why, seconds):
    limits_ns = []

    def measure(arms, *, bounds, **options):
        limits_ns.append(bounds.extended_ns)
        return measure_once(arms, **options)

    with run_of(Mlp().eval(), context_of(measure=measure, why_not_judged=why)) as run:
        pipeline.run_stages(run)
    assert limits_ns == [seconds * 1e9] * 2


def test_a_good_model_passes_every_stage():
    with run_of(Mlp().eval()) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.PASSED
    assert [batch.batch_size for batch in report.batches] == [1, 2]
    gates = [judgement.gate for judgement in report.at(1).judgements]
    assert gates == ["capture", "check", "structure", "speedup", "baseline"]


def test_a_run_leaves_the_model_as_it_was_and_the_generators_as_its_first_eager_calls_left_them():
    model = nn.Sequential(Mlp(), nn.Dropout(0.5)).train()
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with run_of(model, batch_sizes=[2, 4]) as run:
        examples = run.model.examples
        torch.manual_seed(7)
        pipeline.run_stages(run)
    after = torch.get_rng_state()

    torch.manual_seed(7)
    with torch.inference_mode():
        for size in (2, 4):
            twin(*examples[size].args)
    assert torch.equal(after, torch.get_rng_state())
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


class FailsLate(Mlp):
    """Raises in eager calls after the captures."""

    def __init__(self, backend, error):
        super().__init__()
        # A weak reference, because the capture restores all state that the model holds.
        self.backend, self.error = weakref.ref(backend), error

    def forward(self, x):
        if len(self.backend().graphs) == 2:
            raise self.error("in the stage")
        return super().forward(x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_held_after_an_exception_in_the_check(error):
    backend = WatchedBackend()
    model = FailsLate(backend, error).eval()
    with (
        pytest.raises((error, InputError), match="in the stage"),
        run_of(model, context_of(backend=backend)) as run,
    ):
        pipeline.run_stages(run)
    assert_all_are_gone(backend.graphs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_held_after_an_exception_in_the_measurement(error):
    def fail(arms, **options):
        raise error("in the stage")

    backend = WatchedBackend()
    context = context_of(backend=backend, measure=fail)
    # An exception on a line of the user's becomes a failure of the test.
    with pytest.raises((error, EagerFailed), match="in the stage"), run_of(Mlp().eval(), context) as run:
        pipeline.run_stages(run)
    assert_all_are_gone(backend.graphs)


def assert_all_are_gone(graphs):
    assert len(graphs) == 2
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_a_wrong_replay_is_never_timed(monkeypatch):
    # A torch without CUDA has no answer outside a capture.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with run_of(Wrong().eval()) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.WRONG
    assert all(batch.timing is None for batch in report.batches)


def test_a_hazard_ends_the_run_before_any_capture():
    backend = WatchedBackend()
    with run_of(lambda x: x / x.max().item(), context_of(backend=backend)) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.NOT_CAPTURED
    assert [finding.id for finding in report.findings if finding.level == "error"] == ["host-sync"]
    assert backend.graphs == []


def test_a_model_that_computes_nothing_is_told_so():
    with run_of(lambda x: x) as run:
        report = pipeline.run_stages(run)
    (judgement,) = report.at(2).judgements
    assert judgement.reason == "the capture was refused: the graph is empty: the call launches nothing on the device"
    assert judgement.evidence == ()
    assert judgement.remedy == "fix: give the fixture a callable that computes on its inputs with torch"


def test_a_failed_compile_is_a_verdict():
    compiled = torch.compile(Mlp().eval(), backend="eager")
    with run_of(compiled, compile="inductor") as run:
        run.run_eager()
        run.compile()
        report = run.finish()
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
        if x.shape[0] > 1000:
            self.cached = None
        return self.cached * 2


def test_a_wrong_replay_names_the_line_and_the_remedy():
    with run_of(Keeps().eval()) as run:
        report = pipeline.run_stages(run)
    (judgement,) = [each for each in report.at(1).judgements if each.verdict is Verdict.WRONG]
    line = inspect.getsourcelines(Keeps)[1] + 10
    site = Site(file=__file__, line=line, function="forward")
    assert f"assigned at {site} in forward: self.cached = self.layer(x)" in judgement.evidence
    assert judgement.remedy == "fix: write in place with copy_ instead of assigning a new tensor"


LIBRARY = """
from torch import nn

class Keeps(nn.Module):
    cached = None

    def forward(self, x):
        if self.cached is None or self.cached.shape != x.shape:
            self.cached = x * 2
        return self.cached * 2
"""


def test_a_wrong_replay_of_a_library_names_its_line_and_the_users(tmp_path):
    path = tmp_path / "site-packages" / "library.py"
    path.parent.mkdir()
    path.write_text(LIBRARY, encoding="utf-8")
    names = {"__name__": "library"}
    exec(compile(LIBRARY, str(path), "exec"), names)
    inner = names["Keeps"]().eval()

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = inner, nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(self.layer(x))

    with run_of(Mine().eval()) as run:
        report = pipeline.run_stages(run)
    (judgement,) = [each for each in report.at(1).judgements if each.verdict is Verdict.WRONG]
    assigned, called = [line for line in judgement.evidence if line.startswith(("assigned", "called"))]
    assert assigned == f"assigned at {Site(file=str(path), line=9, function='forward')} in forward: self.cached = x * 2"
    line = Mine.forward.__code__.co_firstlineno + 1
    mine = Site(file=__file__, line=line, function="forward")
    assert called == f"called from {mine} in forward: return self.inner(self.layer(x))"


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
    with run_of(broken) as run, pytest.raises(EagerFailed, match=message) as error:
        pipeline.run_stages(run)
    assert isinstance(error.value.__cause__, ValueError)
    assert error.value.own is error.value.__cause__
    first, place, *rest = str(error.value).splitlines()
    assert re.fullmatch(r"batch 1: eager raised ValueError: no such thing \(.*test_model_run.py:\d+\)", first)
    assert re.fullmatch(r'  at .*test_model_run.py:\d+ in broken: raise ValueError\("no such thing.*', place)
    assert rest == ["  the model fails by itself, without any graph"]
    assert error.value.__cause__.__traceback__.tb_frame.f_code.co_name == "broken"


def test_a_tuple_of_inputs_without_its_star_is_explained():
    def add(x, y):
        return x + y

    inputs = (torch.randn(1, 4), torch.randn(1, 4))
    with run_of(add, args=(inputs,)) as run, pytest.raises(EagerFailed) as error:
        pipeline.run_stages(run)
    assert str(error.value).splitlines()[-1] == (
        "  the model got one argument, a tuple of 2; "
        "to give each its own argument, put a star before it: cudagraph(model, *inputs)"
    )


def test_a_measurement_reads_the_reference_and_what_the_operations_take():
    backend, clock = CpuBackend(), PerfCounterClock()
    with run_of(Mlp().eval(), context_of(reference=Reference(backend, clock))) as run:
        timing = pipeline.run_stages(run).at(2).timing
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
    with run_of(model) as run:
        pipeline.run_stages(run)
    assert model.steps == 0


def test_in_a_rehearsal_speed_is_measured_and_not_judged():
    with run_of(Mlp().eval(), context_of(why_not_judged="a rehearsal")) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.NOT_JUDGED
    assert report.at(1).timing.target_ratio is None


class OnMeta(CpuBackend):
    device = "meta"


def test_a_cpu_model_is_copied_to_the_device_and_left_alone():
    model = Mlp().eval()
    prepared = pipeline.prepare_model(ModelCall(model=model, args=(torch.randn(1, 4),)), case_of(), OnMeta())
    assert prepared.eager is not model
    assert {tensor.device.type for tensor in prepared.eager.parameters()} == {"meta"}
    assert prepared.examples[2].args[0].device.type == "meta"
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


def test_inputs_on_another_device_than_the_model_are_refused():
    call = ModelCall(model=Mlp().to("meta"), args=(torch.randn(1, 4),))
    with pytest.raises(InputError, match=r"args\[0\] is on cpu, but this run uses meta"):
        pipeline.prepare_model(call, case_of(), OnMeta())


class CountsThreads(nn.Module):
    """Notes torch's threads at each call."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x):
        self.seen.add(torch.get_num_threads())
        return x + 1


def test_the_twin_runs_with_its_own_threads_and_gives_torch_back_the_old_number(monkeypatch):
    numbers = [torch.get_num_threads()]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    model_run = run_of(CountsThreads(), context_of(measure=measure_once, device=replace(CPU, threads=7)))
    model_run.run(model_run.run_eager)
    assert model_run.model.eager.seen == {7}
    assert numbers == [numbers[0], 7, numbers[0]]


def test_the_device_of_a_run_has_the_threads_that_were_asked_for(tmp_path):
    settings = replace(DEFAULTS, device="cpu", threads=3, rootdir=tmp_path)
    assert pipeline.open_device_context("cpu", settings).device.threads == 3


def test_a_gain_over_compiled_code_is_measured_against_it(packaged_as_exported, tmp_path):
    """The second measurement of the size does not call the model."""
    called, eager_calls = [], []

    def measure(arms, *, rule, **options):
        before = len(called)
        arms.eager()
        eager_calls.append(len(called) - before)
        decision = "pass" if rule.target_ratio < 1 else "fail"
        return replace(facts.timing(), target_ratio=rule.target_ratio, decision=decision)

    model = Mlp().eval()
    model.register_forward_hook(lambda *_: called.append(1))
    run = run_of(model, context_of(measure=measure), compile="aot", batch_sizes=(1,))
    run = replace(run, case=replace(run.case, min_over_compiled=1.05), cache_folder=lambda: tmp_path)
    with run:
        report = pipeline.run_stages(run)
    assert eager_calls == [1, 0]
    (missed,) = [each for each in report.at(1).judgements if each.verdict.fails]
    assert (missed.gate, report.at(1).verdict) == ("over-compiled", Verdict.FAILED)
    assert missed.reason.startswith("replay is 2.00x the compiled code")
    assert "min_over_compiled=1.95)" in failure_text(report)


class Harmless(Mlp):
    """A number that moves and changes nothing: the audit reports it, and the check agrees with eager."""

    step = 0

    def forward(self, x):
        self.step += 1
        return super().forward(x) + x.new_zeros(4) * self.step


def accepting(reasons):
    run = run_of(Harmless().eval(), batch_sizes=(1,))
    return replace(run, case=replace(run.case, accept=reasons))


def test_an_accepted_finding_is_a_note_with_its_reason_and_all_stages_run():
    with accepting({"baked-scalar": "times zero", "rng": "not here"}) as run:
        report = pipeline.run_stages(run)
    assert report.verdict is Verdict.PASSED
    assert [(each.id, each.level, each.accepted) for each in report.findings if each.accepted] == [
        ("baked-scalar", "note", "times zero")
    ]
    accepted, unneeded = report.notes
    assert re.fullmatch(r"accepted: .*test_model_run.py:\d+: a Python number .* \[baked-scalar\]: times zero", accepted)
    assert unneeded == "accept names rng, which was not found"
    with accepting({}) as run:
        assert pipeline.run_stages(run).verdict is Verdict.WRONG


def test_only_hazards_of_the_catalogue_can_be_accepted():
    words = r"accept takes ids of hazards: .*rng.*; found 'dropout'"
    with accepting({"dropout": "I like it"}) as run, pytest.raises(InputError, match=words):
        pipeline.run_stages(run)

"""The audit finds each hazard by id and line, finds nothing in clean models, and puts everything back."""

from __future__ import annotations

import importlib
import linecache
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conformance.cases import CASES, MARK
from tests.conformance.models import clean, loud, quiet, silent
from torch import nn

from pytest_cudagraph import hazards
from pytest_cudagraph.audit import Audit, audit
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import Drawing
from pytest_cudagraph.state import Snapshot

X = torch.ones(2, 4)


class HostBackend:
    """The part of a backend that the audit uses, without a recorder."""

    device = "cpu"

    def __init__(self, kind="cpu"):
        self.kind = kind

    def running(self):
        return torch.inference_mode()

    def rng_state(self, *roots):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)


def example_of(*args, **kwargs):
    return Example(args=args, kwargs=kwargs)


def audited(model, *args, kind="cpu", **kwargs) -> Audit:
    if not args and not kwargs:
        args = (torch.randn(2, 4, generator=torch.Generator().manual_seed(5)),)
    return audit(model, example_of(*args, **kwargs), HostBackend(kind))


def ids(found, level):
    return [finding.id for finding in found.findings if finding.level == level]


class Fills(torch.nn.Module):
    def forward(self, batch, parts):
        batch["h"] = batch["x"] + 1
        parts.append(3)
        batch.pop("mask")
        return batch["h"] * 2


def test_what_a_call_leaves_in_its_containers_is_noted_with_the_line_that_made_it():
    given = {"x": torch.ones(2, 4), "mask": torch.ones(2)}
    found = audited(Fills(), given, [])
    stays = ", but a replay runs no Python and does not change the caller's object"
    assert [(finding.id, finding.evidence) for finding in found.findings] == [
        ("mutates-input", f'`batch["h"] = batch["x"] + 1`: args[0][\'h\'] is added{stays}'),
        ("mutates-input", f"args[1][0] is added{stays}"),
    ]
    assert sorted(given) == ["mask", "x"]


QUICK = [case for case in CASES.values() if not case.slow]
REFUSED = [case for case in QUICK if case.expected.audit]
NOTED = [case for case in QUICK if case.expected.notes and not case.expected.audit]


def is_marked(site):
    return MARK in linecache.getline(site.file, site.line)


def test_what_only_the_first_call_does_is_a_note():
    assert ids(audited(quiet.Lazy()), "note") == ["control-flow"]


def attention_model():
    return nn.MultiheadAttention(8, 2, batch_first=True).eval()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


CLEAN = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.ones(2, 4)),
    "cnn": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).eval(),
        torch.ones(2, 3, 8, 8),
    ),
    "transformer encoder": lambda: (encoder(), torch.ones(2, 5, 16)),
    "lstm": lambda: (nn.LSTM(4, 5, 2, batch_first=True).eval(), torch.ones(2, 6, 4)),
    "gru": lambda: (nn.GRU(4, 5, batch_first=True).eval(), torch.ones(2, 6, 4)),
    "embedding bag": lambda: (nn.EmbeddingBag(10, 4), torch.tensor([[1, 2], [3, 9]])),
    "sdpa": lambda: (clean.AttentionWithoutDropout(), torch.ones(2, 4)),
    "one_hot": lambda: (clean.OneHot(), torch.ones(2, 4)),
    "masked fill": lambda: (clean.NumberUnderMask(), torch.ones(2, 4)),
    "integer index": lambda: (clean.IntegerIndex(), torch.ones(2, 4)),
    "dropout in eval": lambda: (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).eval(), torch.ones(2, 4)),
    "branch for capture": lambda: (silent.CaptureAware(), torch.ones(2, 4)),
    "plain function": lambda: (torch.nn.functional.softplus, torch.ones(2, 4)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_finding_at_all(name):
    model, x = CLEAN[name]()
    assert audited(model, x) == Audit()


def test_attention_with_three_inputs_that_are_one_tensor_is_clean():
    x = torch.ones(2, 3, 8)
    assert audited(attention_model(), x, x, x, need_weights=False) == Audit()


def test_batch_norm_in_training_is_a_note_that_names_its_statistics():
    found = audited(nn.BatchNorm1d(4).train(), torch.randn(3, 4))
    assert [(finding.level, finding.id) for finding in found.findings] == [("note", "mutates-state")]


def test_dropout_in_training_is_a_note_on_random_numbers():
    found = audited(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), torch.ones(2, 4))
    assert [(finding.level, finding.id) for finding in found.findings] == [("note", "rng")]
    (drawn,) = found.findings
    assert drawn.message == "random numbers: the call draws from the default generator, as replays do"
    assert drawn.fix == "none needed. If you want no random numbers, call eval()"


class DrawsInTraining(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=self.training)


TRAINED = {
    "dropout and batch norm": (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Dropout()),
        "(5 modules): BatchNorm1d updates its statistics, Dropout draws random numbers",
    ),
    "a call of its own": (DrawsInTraining(), "(1 module): it draws random numbers"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_mode_is_a_note_where_it_has_an_effect(name):
    model, effects = TRAINED[name]
    words = f"the model is in training mode {effects}. If you do not want this, call .eval()"
    assert audited(model.train(), torch.randn(3, 4)).notes == (words,)
    assert audited(model.eval(), torch.randn(3, 4)).notes == ()


def test_training_mode_without_effect_is_no_note():
    still = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False))
    assert audited(still.train(), torch.randn(3, 4)).notes == ()


@pytest.mark.parametrize("case", [*REFUSED, *NOTED], ids=lambda case: case.name)
def test_model_inputs_and_random_generators_are_left_as_they_were(case):
    model, args, kwargs = case.build()
    before, given = Snapshot.take(model), [tensor.clone() for tensor in args]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with case.around():
        audited(model, *args, **kwargs)
    assert not before.changes()
    assert all(torch.equal(tensor, was) for tensor, was in zip(args, given, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]


def torchs_own():
    patched = [torch.tensor, torch.as_tensor, torch.manual_seed, torch.get_rng_state, torch.cuda.synchronize]
    patched += [torch.cuda.is_current_stream_capturing, nn.Module.__setattr__]
    return dict(vars(torch.Tensor)), patched


def test_torchs_own_methods_are_put_back():
    before = torchs_own()
    audited(loud.Item())
    assert torchs_own() == before


class Raising(nn.Module):
    def __init__(self, at_call):
        super().__init__()
        self.at_call = at_call

    def forward(self, x):
        silent.GLOBAL_CALLS[0] += 1
        if silent.GLOBAL_CALLS[0] == self.at_call:
            raise ValueError("no more\nsecond line")
        return x + 1


def test_what_the_model_raises_at_once_is_not_caught_and_everything_is_put_back(monkeypatch):
    monkeypatch.setattr(silent, "GLOBAL_CALLS", [0])
    before, drawn = torchs_own(), torch.get_rng_state()
    with pytest.raises(ValueError, match="no more"):
        audited(Raising(at_call=1))
    assert torchs_own() == before
    assert torch.equal(torch.get_rng_state(), drawn)


CALLS_AFTER_THE_FIRST = (
    "the second call",
    "the third call",
    "the call outside inference mode",
    "the call on other inputs",
    "the call on zero inputs",
    "the call on negative inputs",
    "the call on large inputs",
    "the call on permuted inputs",
)


@pytest.mark.parametrize("at_call", range(2, 10))
def test_a_later_call_that_raises_is_said_and_passed_over(at_call, monkeypatch):
    monkeypatch.setattr(silent, "GLOBAL_CALLS", [0])
    before = torchs_own()
    found = audited(Raising(at_call=at_call))
    what = CALLS_AFTER_THE_FIRST[at_call - 2]
    assert found == Audit(not_judged=(f"{what}, which raised ValueError: no more",))
    assert torchs_own() == before


def test_a_clean_model_is_called_nine_times_and_once_at_another_batch_size(monkeypatch):
    monkeypatch.setattr(silent, "GLOBAL_CALLS", [0])
    assert audited(Raising(at_call=0)) == Audit()
    assert silent.GLOBAL_CALLS == [9]
    assert audit(Raising(at_call=0), example_of(X), HostBackend(), example_of(torch.ones(4, 4))) == Audit()
    assert silent.GLOBAL_CALLS == [19]


@pytest.mark.parametrize("start", range(3))
def test_a_branch_that_is_taken_every_third_call_is_found_although_no_state_shows_it(start, monkeypatch):
    monkeypatch.setattr(silent, "GLOBAL_CALLS", [start])

    def model(x):
        silent.GLOBAL_CALLS[0] += 1
        return x * 2 if silent.GLOBAL_CALLS[0] % 3 == 0 else x + 1

    assert ids(audited(model), "error") == ["control-flow"]


def test_a_model_that_refuses_inputs_which_only_the_audit_gives_is_not_judged_on_them():
    def model(x):
        assert x.shape[0] < 3, "too many rows"
        return torch.linalg.cholesky_ex(x.T @ x)[0] if HostMath.is_positive(x) else _refuse()

    found = audit(model, example_of(torch.rand(2, 4) + 1), HostBackend(), example_of(torch.rand(4, 4)))
    assert found.findings == ()
    assert found.not_judged == (
        "the call on zero inputs, which raised ValueError: not positive",
        "the call on negative inputs, which raised ValueError: not positive",
        "the call on large inputs, which raised ValueError: not positive",
        "the call at another batch size, which raised AssertionError: too many rows",
    )


class HostMath:
    @staticmethod
    def is_positive(x):
        return bool((np.from_dlpack(x) > 0).all())


def _refuse():
    raise ValueError("not positive")


def test_what_is_refused_only_at_another_batch_size_is_found_there():
    found = audit(loud.OnlyLargeBatches(), example_of(X), HostBackend(), example_of(torch.ones(4, 4)))
    (error,) = found.errors
    assert error.id == "host-sync"
    assert is_marked(error.site)
    assert "another batch size: aten.item" in error.evidence
    assert audited(loud.OnlyLargeBatches()) == Audit()


@pytest.mark.parametrize("cls", [silent.BranchOnZeros, silent.BranchOnNegative, silent.BranchOnLarge])
def test_the_evidence_names_the_inputs_that_take_another_branch(cls):
    model, args, _ = CASES[cls.__name__].build()
    (error,) = audited(model, *args).errors
    kind = {"BranchOnZeros": "zero", "BranchOnNegative": "negative", "BranchOnLarge": "large"}[cls.__name__]
    assert f"calls on {kind} inputs: aten.linear.default, then aten.add.Tensor" in error.evidence


LIBRARY_MODEL = """
import torch

class Layer(torch.nn.Module):
    def forward(self, x):
        return x * x.max().item()
"""


def test_a_finding_in_an_installed_library_names_its_line_and_the_projects(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "layers_of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY_MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    layer = importlib.import_module("layers_of_others").Layer()

    def model(x):
        return layer(x) + 1

    (error,) = audited(model).errors
    assert (Path(error.site.file).parent.name, error.site.line) == ("layers_of_others", 6)
    assert (error.called_from.file, error.called_from.function) == (__file__, "model")
    assert error.called_from.line == model.__code__.co_firstlineno + 1


def test_a_finding_in_the_project_has_no_second_line():
    assert [finding.called_from for finding in audited(loud.Item()).findings] == [None]


def test_a_branch_that_compares_the_type_of_a_device_with_cuda_is_not_judged():
    def model(x):
        if x.device.type == "cuda":
            return x * x.max().item()
        return x + 1

    found = audited(model)
    line = model.__code__.co_firstlineno + 1
    assert found.findings == ()
    (line_shown,) = found.not_judged
    assert line_shown.endswith(f"test_audit.py:{line}, which runs only on a GPU")
    assert line_shown.startswith("the branch at ")


def test_a_branch_on_is_cuda_that_no_cpu_can_run_is_not_judged():
    def model(x):
        if x.is_cuda:
            raise RuntimeError("no kernel for this device")
        return x + 1

    found = audited(model)
    assert found.findings == ()
    (line_shown,) = found.not_judged
    assert "the branch on is_cuda at " in line_shown
    assert line_shown.endswith(", which raised RuntimeError: no kernel for this device")


def test_what_the_host_reads_on_the_branch_of_a_gpu_is_found():
    def model(x):
        return x * sum(x[0].tolist()) if x.is_cuda else x + 1

    (error,) = audited(model).errors
    assert (error.id, error.site.line) == ("host-sync", model.__code__.co_firstlineno + 1)


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's random"), (np.random.rand, "numpy.random")], ids=["python", "numpy"]
)
def test_a_generator_of_the_host_that_moves_to_no_effect_is_a_note(draw, name):
    def model(x):
        draw()
        return x + 1

    (note,) = audited(model).findings
    assert (note.level, note.id) == ("note", "rng")
    assert note.evidence == f"{name} moves, but a replay draws nothing from it"


def test_an_operator_that_draws_without_saying_so_is_a_note():
    library = torch.library.Library("cudagraph_draws", "DEF")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand(()), "CompositeExplicitAutograd")
    found = audited(torch.ops.cudagraph_draws.noise)
    library._destroy()
    (note,) = [finding for finding in found.findings if finding.id == "rng"]
    assert note.evidence == "torch's default generator moves, but no operation says that it draws"


def test_a_constant_that_stays_on_the_host_by_name_is_found_where_it_is_made():
    def model(x):
        half = torch.full((4,), 0.5, device="cpu")
        return x.relu() * half

    (error,) = audited(model).errors
    assert (error.id, error.site.line) == ("host-data", model.__code__.co_firstlineno + 1)
    assert error.evidence.endswith(
        "aten.mul: takes this host tensor with tensors of the device. Eager CUDA raises the same"
    )


GLOBAL_HOST_TENSOR = torch.ones(4)


def test_a_constant_of_the_host_that_meets_only_the_hosts_tensors_is_not_judged():
    def model(x):
        table = GLOBAL_HOST_TENSOR + torch.ones(4, device="cpu") + torch.arange(4)
        return x + table.shape[0]

    assert ids(audited(model), "error") == []


def test_a_scripted_model_is_not_audited():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    assert audited(scripted).not_judged == ("the model is scripted. Audit its eager code instead",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "line"),
    [
        (lambda model: torch.compile(model, backend="eager"), "the model is compiled"),
        (lambda model: nn.Sequential(torch.compile(model, backend="eager")), "0 is compiled"),
        (lambda model: torch.compile(lambda x: model(x), backend="eager"), "the model is compiled"),
    ],
    ids=["module", "part", "function"],
)
def test_compiled_code_is_neither_audited_nor_called(wrap, line):
    found = audited(wrap(loud.Item()))
    assert found == Audit(not_judged=(f"{line}. Audit its eager code instead",))


def twice(x):
    return x * 2


class CallsAFunction(nn.Module):
    def forward(self, x):
        return twice(x) + 1


@pytest.mark.slow
def test_a_model_that_calls_a_compiled_function_is_not_audited(monkeypatch):
    """The audit sees its results only: tensors from outside, at another address in each call."""
    monkeypatch.setitem(globals(), "twice", torch.compile(twice, backend="eager"))
    assert audited(CallsAFunction()).not_judged == (
        "twice, which CallsAFunction calls, is compiled. Audit its eager code instead",
    )


@pytest.mark.slow
def test_a_module_compiled_in_place_is_not_audited():
    model = loud.Item()
    model.compile(backend="eager")
    assert audited(model).not_judged == ("the model is compiled. Audit its eager code instead",)


def test_a_custom_operator_is_said_not_to_be_judged():
    library = torch.library.Library("cudagraph_audit", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    found = audited(torch.ops.cudagraph_audit.twice)
    library._destroy()
    assert ids(found, "note") == ["unknown-op"]
    assert found.not_judged == ("custom operator cudagraph_audit::twice",)


def test_reading_tensors_of_the_host_is_the_hosts_own_business():
    def model(x):
        table = torch.arange(4.0)
        return x + table[table > 1].sum()

    assert ids(audited(model, kind="cuda"), "error") == []
    assert ids(audited(model, kind="cpu"), "error") == []
    assert ids(audited(loud.HostList(), kind="cuda"), "error") == []


def test_on_a_gpu_the_state_of_the_hosts_own_generator_is_free_and_a_seed_is_not():
    assert ids(audited(loud.RngState(), kind="cuda"), "error") == []
    assert ids(audited(loud.Reseeding(), kind="cuda"), "error") == ["rng"]


def test_a_number_written_to_a_part_of_a_tensor_is_not_worth_a_note():
    assert audited(clean.OwnTemporaryInPlace()) == Audit()


@pytest.mark.parametrize("cls", [loud.Item, loud.ToList])
def test_a_value_that_the_host_reads_from_an_input_is_baked_even_where_reading_is_allowed(cls):
    assert ids(audited(cls(), kind="cuda"), "error") == ["baked-scalar"]


def test_state_reached_through_a_bound_method_or_a_closure_is_known():
    model = quiet.BufferInPlace()
    assert ids(audited(model.forward), "note") == ["mutates-state"]
    assert ids(audited(lambda x: model(x)), "note") == ["mutates-state"]


class Cache:
    def __init__(self):
        self.keys = torch.zeros(2, 4)


def test_an_opaque_argument_that_is_written_is_state_and_is_put_back():
    cache = Cache()
    found = audited(lambda x, cache: cache.keys.add_(x) * 2, torch.ones(2, 4), cache=cache)
    assert ids(found, "note") == ["mutates-state"]
    assert torch.equal(cache.keys, torch.zeros(2, 4))


def test_an_explicit_synchronisation_is_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def model(x):
        torch.cuda.synchronize()
        return x + 1

    (finding,) = audited(model).findings
    assert (finding.id, finding.site.line) == ("host-sync", model.__code__.co_firstlineno + 1)


def test_the_findings_of_a_model_of_plain_modules_point_at_the_line_that_uses_it():
    found = audited(nn.Sequential(nn.BatchNorm1d(4)).train(), torch.randn(3, 4))
    assert found.findings[0].site.file == __file__


REVIEWED = [
    loud.Item, loud.MaskRead, loud.HostList, loud.OwnGenerator, silent.Counter, silent.Temperature,
    silent.BufferReassigned, silent.GrowingCache, silent.NumpyWrite, quiet.BufferInPlace, quiet.InputInPlace,
    silent.RareBranch, silent.DayOfTheYear, quiet.InputView, quiet.ParameterReturned, silent.KeepsLast,
    quiet.Appends, quiet.GlobalTensor, quiet.Lazy,
]  # fmt: skip


def test_the_texts_of_findings_are_reviewed(golden):
    lines = []
    for cls in REVIEWED:
        lines.append(cls.__name__)
        for finding in audited(cls()).findings:
            kind = "loud" if finding.loud else "silent"
            where = f"{Path(finding.site.file).name} in {finding.site.function}" if finding.site else "no line"
            lines += [f"  {finding.level} {finding.id} ({kind}, {where}): {finding.message}", f"    {finding.evidence}"]
            lines += [f"    fix: {finding.fix}"] if finding.level == "warning" else []
            assert finding.level == "warning" or finding.fix == hazards.CATALOGUE[finding.id].fix
    golden("audit-findings.txt", re.sub(r"line \d+", "line N", "\n".join(lines)))


@pytest.mark.slow
def test_torch_compile_works_after_an_audit_of_the_same_class():
    executions = []

    def counting(graph, _):
        def run(*args):
            executions.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=counting)
    audited(model, x)
    compiled(x)
    audited(model, x)
    compiled(x)
    assert len(executions) == 2


class IdsAmongNumbers(nn.Module):
    """As models of tables: the first column is an index, the others are numbers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x):
        return self.table(x[:, 0].long()) + x


def test_inputs_of_the_audit_run_no_operation_that_would_end_a_gpu():
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 7]])
    found = audited(IdsAmongNumbers(), x, kind="cuda")
    assert "the call on negative inputs, which raised WouldTrapError: aten::embedding would trap" in found.not_judged
    assert not found.errors


def test_a_model_whose_inputs_the_user_draws_is_audited_on_these_only():
    seen = []

    class Sees(nn.Module):
        def forward(self, x):
            seen.append(x.clone())
            return x + 1

    ones = Example(args=(torch.ones(2, 4),), kwargs={})
    drawing = Drawing(call=lambda seed: Example(args=(torch.full((2, 4), 1.0 + seed),), kwargs={}), count=0)
    audit(Sees(), replace(ones, drawing=drawing), HostBackend())
    assert {float(x.unique()) for x in seen} == {1.0, 2.0}


class Windowed(nn.Module):
    """As KAN and pytorch_msssim: a table that nobody registered."""

    def __init__(self, use):
        super().__init__()
        self.linear, self.window = nn.Linear(4, 4), torch.arange(4)
        self.use = use

    def forward(self, x):
        return self.use(self.linear(x), self.window)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, window: x * window,
        lambda x, window: x[:, window],
        lambda x, window: x * window.to(x.device),
        lambda x, window: x * (window + 1).to(x.device, x.dtype),
        lambda x, window: torch.cat([x, (window / 2).expand(2, 4)]) * window,
    ],
)
def test_an_attribute_that_module_to_leaves_on_the_host_is_a_warning(use):
    found = audited(Windowed(use).eval())
    (warning,) = [finding for finding in found.findings if finding.level == "warning"]
    assert (warning.id, warning.site.function) == ("host-data", "<lambda>")
    assert "window is neither a parameter nor a buffer, so that Module.to leaves it on the host" in warning.evidence
    assert "register_buffer" in warning.fix
    assert not found.errors


class Schedule:
    """An object that is no module, with a table of its own."""

    def __init__(self, steps):
        self.table = torch.linspace(0, 1, steps)


class HoldsWindows(nn.Module):
    """Tables in containers, in another object, in a distribution, and set by a later method."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.by_name = {"first": torch.arange(4)}
        self.masks = []
        self.masks.append(torch.ones(4))
        self.schedule = Schedule(4)
        self.noise = torch.distributions.Uniform(torch.zeros(4), torch.ones(4), validate_args=False)
        self.cached = None
        self.begin(4)

    def begin(self, length):
        self.cached = torch.arange(length)

    def forward(self, x):
        return self.linear(x) * self.read(self)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda model: model.by_name["first"], "by_name['first']"),
        (lambda model: model.masks[0], "masks[0]"),
        (lambda model: model.schedule.table, "schedule.table"),
        (lambda model: model.noise.rsample().to(model.linear.weight.device), "noise.low"),
        (lambda model: model.cached, "cached"),
    ],
)
def test_a_table_that_a_model_holds_in_another_place_is_a_warning_too(read, name):
    found = audited(HoldsWindows(read).eval())
    (warning,) = [finding for finding in found.findings if finding.level == "warning"]
    assert f"{name} is neither a parameter nor a buffer, so that Module.to leaves it on the host" in warning.evidence
    assert warning.id == "host-data"


class WindowedOnItsDevice(Windowed):
    def __init__(self, device=None):
        super().__init__(lambda x, window: x * window)
        self.window = torch.arange(4, device=self.linear.weight.device)


class WindowedLater(Windowed):
    def __init__(self):
        super().__init__(lambda x, window: x * window)
        self.window = None

    def forward(self, x):
        if self.window is None:
            self.window = torch.arange(4, device=x.device)
        return super().forward(x)


class WindowFromOutside(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, x):
        return x * self.window


class MovesItsWindows(nn.Module):
    """Containers, an object and a later method, each on the device of the weights, and a table that was passed."""

    def __init__(self, window):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by_name = {"first": window}
        self.masks = []
        self.masks.append(torch.ones(4, device=self.linear.weight.device))
        self.begin(window.device)

    def begin(self, device):
        self.cached = torch.arange(4, device=device)

    def _apply(self, fn):
        self.passed = fn(torch.ones(4))
        return super()._apply(fn)

    def forward(self, x):
        return self.linear(x) * self.by_name["first"] * self.masks[0] * self.cached * self.passed


@pytest.mark.parametrize(
    "build",
    [
        WindowedOnItsDevice,
        WindowedLater,
        lambda: MovesItsWindows(torch.ones(4)).float(),
        lambda: WindowFromOutside(torch.arange(4)),
        lambda: Windowed(lambda x, window: x[:, : window[3:].tolist()[0]]),
        lambda: Windowed(lambda x, window: x * window[2]),
    ],
    ids=["device named", "made in a call", "moved in other places", "passed", "read by the host", "a number"],
)
def test_an_attribute_on_the_device_or_for_the_host_is_none(build):
    found = audited(build().eval())
    assert [finding for finding in found.findings if finding.level == "warning"] == []

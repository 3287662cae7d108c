"""Values whose own methods raise, have no end or no values: the user's error at the user's line, or one clear error."""

from __future__ import annotations

import pytest
from tests.plugin.conftest import MODELS

HOSTILE = """
from torch._subclasses.fake_tensor import FakeTensorMode

X = torch.randn(1, 16)


class Hostile:
    def __repr__(self):
        raise LookupError("repr")

    __float__ = __bool__ = __len__ = __iter__ = __repr__

    def __eq__(self, other):
        raise LookupError("eq")

    __hash__ = object.__hash__


class HostileModel:
    def __call__(self, x):
        return x * 2

    def __getattribute__(self, name):
        raise LookupError(name)


class HostileError(Exception):
    def __str__(self):
        raise LookupError("str")


def raises(x):
    raise HostileError


def resizes(x):
    return x.resize_(4, 16) + 1


def deep(levels=1000):
    found = [X]
    for _ in range(levels):
        found = [found]
    return found


def looped():
    found = {"x": X}
    found["self"] = found
    return found


def fake():
    with FakeTensorMode():
        return torch.empty(1, 16)


class HoldsBoth(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.looped, self.hostile = deep(), looped(), Hostile()

    def forward(self, x):
        return x * 2
"""

CLEAR = {
    "minimum": ("cudagraph(Mlp(), X, min_speedup=Hostile())", "min_speedup takes a number above 0; found <Hostile"),
    "text_as_size": (
        "cudagraph(Mlp(), X, min_speedup={'1': 1.1})",
        "min_speedup takes a number above 0, or {batch size: number above 0}; found {'1': 1.1}",
    ),
    "compile": ("cudagraph(Mlp(), X, compile=Hostile())", "compile takes one of none, inductor, aot; found <Hostile"),
    "size": ("cudagraph(Mlp(), X, batch_sizes=[Hostile()])", "batch_sizes takes distinct whole numbers of at least 1"),
    "huge_size": ("cudagraph(Mlp(), X, batch_sizes=[10**30])", "batch size 1000000000000000000000000000000: an input"),
    "batch_dim": ("cudagraph(Mlp(), X, batch_dim=Hostile())", "batch_dim=<Hostile instance at"),
    "deep_batch_dim": ("cudagraph(Mlp(), X, batch_dim=deep())", "batch_dim[0]=[[[[[[[...]]]]]]] does not match"),
    "test_name": ("cudagraph(Mlp(), X, name=Hostile())", "name takes a non-empty string; found <Hostile instance at"),
    "keyword": ("cudagraph(Mlp(), kwargs={Hostile(): X})", "kwargs takes a mapping of argument names to values"),
    "digits": ("cudagraph(Mlp(), X, scale=10**6000)", "cudagraph takes kwargs, batch_sizes, batch_dim"),
    "deep_input": ("cudagraph(lambda x: X * 2, deep())", "containers of arguments and outputs may be nested some"),
    "looped_input": ("cudagraph(lambda x: x['x'] * 2, looped())", "containers of arguments and outputs may be nested"),
    "looped_output": ("cudagraph(lambda x: looped(), X)", "containers of arguments and outputs may be nested some"),
    "quantized": (
        "cudagraph(lambda x: x, torch.quantize_per_tensor(X, 0.1, 0, torch.quint8))",
        "args[0] is a quantized tensor, but graphs take only tensors whose values can be set: pass it as .dequantize()",
    ),
    "fake": ("cudagraph(lambda x: x * 2, fake())", "args[0] is a fake tensor, but graphs take only tensors whose"),
    "fake_output": ("cudagraph(lambda x: fake(), X)", "the output holds a fake tensor, which has no values"),
    "resized": (
        "cudagraph(resizes, X)",
        "batch 1: a graph reads inputs of fixed sizes; the model resizes args[0] from (1, 16) to (4, 16): let it work "
        "on a copy (args[0].clone())",
    ),
}
OWN = {
    "model": ("cudagraph(HostileModel(), X)", "LookupError: __class__"),
    "key": ("cudagraph(lambda x, y: x * 2, X, {Hostile(): X})", "LookupError: repr"),
    "error": ("cudagraph(raises, X)", "models.HostileError: <exception str() failed>"),
}


@pytest.fixture
def hostile(project):
    project.pytester.makepyfile(models=MODELS + HOSTILE)
    return project


def test_each_hostile_value_is_one_clear_error_or_the_users_own(hostile):
    hostile.write(**{test: body for test, (body, _) in (CLEAR | OWN).items()})
    result = hostile.measure("--tb=short", "-q")
    result.assert_outcomes(failed=len(CLEAR) + len(OWN))
    shown = result.stdout.str()
    assert [text for _, text in CLEAR.values() if f"InputError: {text}" not in shown] == []
    assert [text for _, text in OWN.values() if f"E   {text}" not in shown] == []
    assert "pytest_cudagraph/" not in shown


def test_what_a_model_holds_may_be_hostile(hostile):
    hostile.write(holds="cudagraph(HoldsBoth(), X, min_speedup=0.01)")
    hostile.measure().assert_outcomes(passed=1)


OTHER_FIXTURES = """
from models import *
import pytest

def test_every(perf_monitor):
    perf_monitor(every_s=Hostile())

def test_within(perf_monitor):
    monitor = perf_monitor()
    with monitor, monitor:
        pass

def test_early(perf_monitor):
    perf_monitor().card

def test_mode(compile_model):
    compile_model(Mlp(), X, mode=Hostile())

def test_other_size(compile_model):
    compile_model(Mlp(), X, mode="none", batch_sizes=[1])(torch.randn(7, 16))

def test_no_tensor(compile_model):
    compile_model(Mlp(), X, mode="none")(3)

def test_minimum(capture_graphs, measure_speedup):
    measure_speedup(capture_graphs(Mlp(), X, batch_sizes=[1]), min_speedup=Hostile())
"""


def test_the_other_fixtures_answer_in_one_clear_error_too(hostile):
    hostile.pytester.makepyfile(test_user=OTHER_FIXTURES)
    result = hostile.measure("--tb=short", "-q")
    result.assert_outcomes(failed=7)
    assert "pytest_cudagraph/" not in result.stdout.str()
    assert len([line for line in result.outlines if line.startswith("E ")]) == 7


MARKS = {
    "min={'1': 1.1}": "min takes a number above 0, or {batch size: number above 0}; found {'1': 1.1}",
    "min=Hostile()": "min takes a number above 0; found <Hostile instance at",
    "rtol=Hostile()": "rtol takes a number of at least 0; found <Hostile instance at",
    "compile=Hostile()": "compile takes one of none, inductor, aot; found <Hostile instance at",
    "batch_sizes=[Hostile()]": "batch_sizes takes distinct whole numbers of at least 1",
    "Hostile()": "takes no positional arguments; found <Hostile instance at",
}


@pytest.mark.parametrize("mark", MARKS)
def test_a_hostile_value_in_a_mark_is_one_error_of_that_test(hostile, mark):
    lines = "from models import *\nimport pytest\n\n@pytest.mark.graph_speedup({})\ndef test_marked(cudagraph): pass"
    hostile.pytester.makepyfile(test_user=lines.format(mark))
    result = hostile.measure()
    result.assert_outcomes(errors=1)
    (told,) = [line for line in result.outlines if line.startswith("test_user.py::test_marked: @pytest.mark.")]
    assert MARKS[mark] in told
    assert "INTERNALERROR" not in result.stdout.str()

"""Generators of a model's own: found, made known to the graph, and left where they stood."""

import functools

import pytest
import torch
from tests.fake_cuda import FakeCuda
from torch import nn

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.gpu import register
from pytest_cudagraph.backends.generators import generators_of
from pytest_cudagraph.errors import CaptureRefusal

pytestmark = pytest.mark.usefixtures("no_collections")

GENERATOR = torch.Generator()


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + torch.rand(2, generator=self.generator)


class Holder:
    def __init__(self, held):
        self.held = held

    def call(self, x):
        return x


def uses_a_global(x):
    return torch.rand(2, generator=GENERATOR)


def closing_over(generator):
    return lambda x: torch.rand(2, generator=generator)


def with_default(x, generator=GENERATOR):
    return x


@pytest.mark.parametrize(
    "roots",
    [
        (GENERATOR,),
        ([{"deep": (GENERATOR,)}],),
        (Holder(GENERATOR),),
        (Holder(Holder([GENERATOR])).call,),
        (functools.partial(with_default, generator=GENERATOR),),
        (with_default,),
        (uses_a_global,),
        (closing_over(GENERATOR),),
        (nn.Sequential(nn.ReLU(), nn.Sequential()), (), {"generator": GENERATOR}),
    ],
)
def test_a_generator_is_found_wherever_a_call_can_reach_it(roots):
    assert generators_of("cpu", *roots) == [GENERATOR]


def test_a_generator_of_a_submodule_is_found_once():
    layer = Draws()
    assert generators_of("cpu", nn.Sequential(nn.Sequential(layer), layer)) == [layer.generator]


def test_a_generator_without_an_index_draws_on_every_device_of_its_kind():
    # torch.Generator("cuda") has no index, as this one has none.
    assert GENERATOR.device.index is None
    assert generators_of("cpu:0", [GENERATOR]) == [GENERATOR]


def test_generators_of_another_device_are_not_meant():
    assert generators_of("cuda:0", [GENERATOR]) == []


def test_cycles_end_and_unbound_variables_are_no_error():
    loop = []
    loop.append(loop)

    def outer():
        def inner():
            return later

        found = generators_of("cpu", inner, loop)
        later = found
        return later

    assert outer() == []


def test_a_search_visits_at_most_its_limit():
    assert generators_of("cpu", [[[GENERATOR]]], limit=2) == []


def test_a_model_with_a_generator_of_its_own_is_captured_and_the_generator_stays_where_it_stood(cuda, pool):
    model = Draws()
    before = model.generator.get_state()
    graph = pool.capture(model, (torch.zeros(2),), {}, batch_size=2)
    assert cuda.names().count("register_generator") == 1
    assert cuda.names().index("register_generator") < cuda.names().index("capture_begin")
    assert torch.equal(model.generator.get_state(), before)
    first = graph.replay().clone()
    model.generator.manual_seed(3)
    assert torch.equal(model(torch.zeros(2)), first)


def test_without_registration_torch_would_refuse_it(pool, monkeypatch):
    # Shows that the fake refuses as torch does, and hence that the test above proves something.
    monkeypatch.setattr("pytest_cudagraph.backends.cuda.pool.generators_of", lambda *_: [])
    with pytest.raises(CaptureRefusal, match="generator not in capture mode") as raised:
        pool.capture(Draws(), (torch.zeros(2),), {}, batch_size=2)
    assert raised.value.hazard == "rng"


def test_a_generator_stays_where_it_stood_after_a_refusal_and_the_test_capture_ends_its_capture_mode(cuda, pool):
    model = Draws()
    before = model.generator.get_state()
    with pytest.raises(CaptureRefusal, match="operation not permitted"):
        pool.capture(lambda x: model(x) * x.sum().item(), (torch.zeros(2),), {}, batch_size=2)
    assert torch.equal(model.generator.get_state(), before)
    # at the capture that was refused, and at the clean one after it: only an end that succeeds resets a generator
    assert cuda.names().count("register_generator") == 2


def test_a_torch_that_finds_generators_itself_is_not_told_and_its_deprecation_disturbs_nobody():
    import warnings

    class Deprecating:
        def register_generator_state(self, generator):
            warnings.warn("deprecated", DeprecationWarning, stacklevel=2)

    register(Deprecating(), [GENERATOR])
    register(object(), [GENERATOR])
    cuda = FakeCuda(version=(2, 14))
    with CudaBackend(cuda=cuda, device="cpu").pool() as pool:
        pool.capture(Draws(), (torch.zeros(2),), {}, batch_size=2)

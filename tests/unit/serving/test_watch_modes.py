"""When each ``watch`` of a runner sees that a weight was replaced: at once, within 10 ms, or when told to look."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from tests.fake_clock import FakeClock
from torch import nn
from torch.nn.utils import parametrize

from pytest_cudagraph import CaptureRefusal, GraphRunner
from pytest_cudagraph.errors import DeadTensorError
from pytest_cudagraph.serving import graph_set
from pytest_cudagraph.serving.replacements import Replacements

PLACES = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module", "_apply")
LATE_NS = 10_000_001
SPARE = nn.Linear(3, 3)
"""The making of a module tells too, so it is made before."""


class Net(nn.Module):
    """Two modules with the same weights, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.same = nn.Linear(3, 3)
        self.same.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(3))
        self.register_parameter("unused", nn.Parameter(torch.ones(2)))

    def forward(self, x):
        return self.drop(self.same(self.first(x))) * self.scale


def other(*shape):
    return torch.full(shape, 0.25)


def assign_state(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def swap(model):
    torch.utils.swap_tensors(model.first.bias, nn.Parameter(other(3)))


@torch.no_grad()
def set_parameter(model):
    model.first.weight.set_(other(3, 3))


@torch.no_grad()
def set_buffer(model):
    model.scale.set_(other(3))


@torch.no_grad()
def transpose(model):
    model.first.weight.t_()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def sparse_register(model):
    model.register_buffer("more", torch.ones(1))


AT_ONCE = {
    "a parameter is assigned": lambda model: setattr(model.first, "weight", nn.Parameter(other(3, 3))),
    "a shared module's parameter is assigned": lambda model: setattr(model.same, "weight", nn.Parameter(other(3, 3))),
    "a parameter's data are assigned": lambda model: setattr(model.first.bias, "data", other(3)),
    "a parameter's memory is set": set_parameter,
    "a state is loaded by assignment": assign_state,
    "two tensors are swapped": swap,
    "another dtype": lambda model: model.double(),
    "to() another dtype": lambda model: model.to(torch.float64),
    "a parameter is deleted": lambda model: delattr(model, "unused"),
    "a parameter is None": lambda model: setattr(model, "unused", None),
    "a buffer is assigned": lambda model: setattr(model, "scale", other(3)),
    "a buffer is registered": sparse_register,
    "a nested module is replaced": lambda model: setattr(model, "same", nn.Linear(3, 3)),
    "a module is added": lambda model: model.add_module("more", nn.Linear(1, 1)),
    "a parametrization": lambda model: parametrize.register_parametrization(model.first, "weight", Doubled()),
    "train()": lambda model: model.train(),
    "the training flag of one module": lambda model: setattr(model.drop, "training", True),
}
WITHIN_10_MS = {
    "an entry of the parameters": lambda model: model.first._parameters.update(weight=nn.Parameter(other(3, 3))),
    "an entry of the buffers": lambda model: model._buffers.update(scale=other(3)),
    "an entry of the modules": lambda model: model._modules.update(same=SPARE),
    "a buffer's data are assigned": lambda model: setattr(model.scale, "data", other(3)),
    "a buffer's memory is set": set_buffer,
    "a parameter's strides": transpose,
}
NO_CHANGE = {
    "copy_": lambda model: model.first.bias.data.copy_(other(3)),
    "copy_ under no_grad": lambda model: torch.no_grad()(model.first.bias.copy_)(other(3)),
    "a buffer is filled": lambda model: model.scale.fill_(3.0),
    "a state is loaded in place": lambda model: model.load_state_dict(
        {name: value * 2 for name, value in model.state_dict().items()}
    ),
    "requires_grad_": lambda model: model.requires_grad_(False),
}


@pytest.fixture
def clock(monkeypatch):
    """The time of every runner of this test."""
    clock = FakeClock()
    monkeypatch.setattr(graph_set, "Replacements", lambda: Replacements(clock.now_ns))
    return clock


@pytest.fixture
def serve(clock):
    """Makes a runner of a model, after its first served call."""
    runners = []

    def make(model, watch, **options):
        run = GraphRunner(model, torch.ones(1, 3), batch_sizes=(1,), device="cpu", watch=watch, **options)
        runners.append(run)
        run(torch.ones(1, 3))
        return run

    yield make
    for run in runners:
        run.close()


def changes(run):
    """The changes of the model that a call sees. A model that no longer runs raises: it was seen too."""
    before = run.statistics.state_changes
    try:
        run(torch.ones(1, 3))
    except (AttributeError, RuntimeError, TypeError):
        return 1
    return run.statistics.state_changes - before


@pytest.mark.parametrize("how", AT_ONCE)
def test_what_goes_through_torchs_functions_is_seen_at_once(serve, how):
    model = Net().eval()
    runs = {watch: serve(model, watch) for watch in ("call", "hooks", "manual")}
    AT_ONCE[how](model)
    assert {watch: changes(run) for watch, run in runs.items()} == {"call": 1, "hooks": 1, "manual": 0}
    assert runs["manual"].renew_if_changed()


@pytest.mark.parametrize("how", WITHIN_10_MS)
def test_what_goes_past_them_is_seen_within_10_ms_and_until_then_the_graph_serves_the_old_weights(serve, clock, how):
    seen = {}
    for watch in ("call", "hooks", "manual"):
        model = Net().eval()
        run = serve(model, watch)
        WITHIN_10_MS[how](model)
        at_once = changes(run)
        clock.time_ns += LATE_NS
        seen[watch] = at_once, changes(run)
    assert seen == {"call": (1, 0), "hooks": (0, 1), "manual": (0, 0)}


def test_a_resized_storage_is_freed_memory_until_it_is_seen(serve, clock):
    model = Net().eval()
    run = serve(model, "hooks")
    model.scale.untyped_storage().resize_(1 << 20)
    with pytest.raises(DeadTensorError, match="scale"):
        run(torch.ones(1, 3))
    clock.time_ns += LATE_NS
    assert changes(run) == 1


@pytest.mark.parametrize("watch", ["call", "hooks", "manual"])
@pytest.mark.parametrize("how", NO_CHANGE)
def test_values_in_place_are_no_change_and_the_next_replay_reads_them(serve, clock, how, watch):
    model = Net().eval()
    run = serve(model, watch)
    NO_CHANGE[how](model)
    clock.time_ns += LATE_NS
    assert changes(run) == 0
    with torch.inference_mode():
        torch.testing.assert_close(run(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_told_to_look_a_runner_with_hooks_looks_in_full(serve):
    model = Net().eval()
    run = serve(model, "hooks")
    model._buffers["scale"] = other(3)
    assert run.renew_if_changed()


def test_a_strict_runner_refuses_each_call_until_it_is_captured_again(serve):
    model = Net().eval()
    run = serve(model, "hooks", strict=True)
    model.first.bias.data = other(3)
    for _ in range(2):
        with pytest.raises(CaptureRefusal, match="the model has changed since its capture"):
            run(torch.ones(1, 3))
    run.recapture()
    assert changes(run) == 0


def test_a_replacement_in_another_thread_while_a_call_looks_is_seen_by_the_next_call(monkeypatch):
    replacements, layer = Replacements(), nn.Linear(1, 1)
    assert replacements.is_due()
    thread = threading.Thread(target=lambda: setattr(layer, "weight", None))
    thread.start()
    thread.join()
    replacements.found_none()  # what the look before the thread's write has found
    assert replacements.is_due()
    replacements.close()


def test_a_plain_attribute_makes_no_look_due():
    replacements, layer = Replacements(FakeClock().now_ns), nn.Linear(1, 1)
    assert replacements.is_due()
    replacements.found_none()
    layer.calls = 3
    layer.cached = torch.ones(2)
    del layer.calls
    layer.weight.data  # noqa: B018
    replacements.is_due()
    replacements.found_none()
    layer.calls = 4
    assert not replacements.is_due()
    layer.bias = None
    assert replacements.is_due()
    replacements.close()


def places():
    return [vars(nn.Module).get(name) for name in PLACES] + [
        vars(nn.Parameter).get("data"),
        vars(nn.Parameter).get("set_"),
        torch.utils.swap_tensors,
    ]


def test_torch_is_wrapped_only_as_long_as_somebody_listens():
    before = places()
    first, second = Replacements(), Replacements()
    wrapped = places()
    assert all(one is not other for one, other in zip(before, wrapped, strict=True))
    first.close()
    first.close()
    assert all(one is other for one, other in zip(wrapped, places(), strict=True))
    del second
    gc.collect()
    assert places() == before


def test_a_runner_that_could_not_be_made_leaves_torch_as_it_was():
    before = places()

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        GraphRunner(Fails(), torch.ones(1, 3), batch_sizes=(1,), device="cpu", watch="hooks")
    assert places() == before


def test_code_that_wrapped_a_place_after_us_keeps_it(monkeypatch):
    replacements = Replacements()
    ours = nn.Module.register_buffer

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_buffer", theirs)
    replacements.close()
    assert nn.Module.register_buffer is theirs
    nn.Module().register_buffer("x", torch.ones(1))
    monkeypatch.undo()
    nn.Module.register_buffer = ours.__wrapped__


def test_a_wrapped_parameter_reads_and_takes_its_data_as_before():
    parameter = nn.Parameter(torch.ones(2))
    replacements = Replacements()
    try:
        assert torch.equal(parameter.data, torch.ones(2))
        parameter.data = torch.zeros(2)
        assert parameter.tolist() == [0.0, 0.0]
        assert nn.Parameter.data.__doc__ == torch.Tensor.data.__doc__
        with pytest.raises(TypeError):
            parameter.data = 3
        compiled = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)
        assert compiled(torch.ones(1, 2)).shape == (1, 2)
    finally:
        replacements.close()

"""The CPU twin keeps nothing alive but what a graph owns, and says so when what it reads is gone."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_cudagraph import CudagraphError
from pytest_cudagraph.errors import DeadTensorError


def capture(twin, model, *args):
    return twin.capture(model, args, {}, batch_size=2)


class Scaled(nn.Module):
    """A parameter, a buffer, and a tensor that is only hung on the module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(2))
        self.table = torch.ones(2)

    def forward(self, x):
        return self.linear(x) * self.table + self.shift


def test_a_graph_keeps_no_memory_of_the_model_alive(twin):
    model = Scaled()
    held = [*model.parameters(), *model.buffers(), model.table]
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in held]
    graph = capture(twin, model, torch.ones(2, 2))
    graph.replay()
    del model, held
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert graph.replays == 1


def replaces_table(model):
    model.table = model.table.clone()


def deletes_table(model):
    del model.table


def replaces_buffer(model):
    model.shift = torch.zeros(2)


def replaces_data(model):
    model.linear.weight.data = model.linear.weight.data.clone()


def assigns_state(model):
    model.linear.load_state_dict({n: t.clone() for n, t in model.linear.state_dict().items()}, assign=True)


def casts_there_and_back(model):
    model.double().float()


def grows_buffer(model):
    model.shift.resize_(100_000)


def empties_parameter(model):
    model.linear.weight.untyped_storage().resize_(0)


LOST = {
    "table replaced": (replaces_table, ["table: float32 (2,), read by aten.mul"]),
    "table deleted": (deletes_table, ["table: float32 (2,), read by aten.mul"]),
    "buffer replaced": (replaces_buffer, ["shift: float32 (2,), read by aten.add"]),
    "data replaced": (replaces_data, ["linear.weight: float32 (2, 2), read by aten.linear"]),
    "buffer moved": (grows_buffer, ["shift: float32 (2,), read by aten.add"]),
    "assigned": (
        assigns_state,
        ["linear.weight: float32 (2, 2), read by aten.linear", "linear.bias: float32 (2,), read by aten.linear"],
    ),
    "cast": (
        casts_there_and_back,
        [
            "linear.weight: float32 (2, 2), read by aten.linear",
            "linear.bias: float32 (2,), read by aten.linear",
            "shift: float32 (2,), read by aten.add",
        ],
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_replay_that_would_read_freed_memory_raises_and_names_it(twin, name):
    lose, gone = LOST[name]
    model = Scaled()
    graph = capture(twin, model, torch.ones(2, 2))
    output = graph.replay().clone()
    lose(model)
    for use in (graph.replay, lambda: graph(torch.ones(2, 2))):
        with pytest.raises(DeadTensorError) as caught:
            use()
        first, *named, remedy = str(caught.value).splitlines()
        assert first == (
            f"replay detected {len(gone)} dead tensor{'s' if len(gone) > 1 else ''}: the graph of batch size 2 "
            "reads memory by its address at capture, which has been freed since"
        )
        assert [line.strip().partition(", tests/")[0] for line in named] == gone
        line = Scaled.forward.__code__.co_firstlineno + 1
        assert all(f"test_cpu_memory.py:{line} in forward: return self.linear(x)" in each for each in named)
        assert remedy == "  write new values with copy_() into the tensor that was captured, or capture again"
    assert isinstance(caught.value, CudagraphError)
    assert graph.replays == 1
    assert output.isfinite().all()


def test_a_parameter_without_its_memory_is_found_by_the_replay_after_poison(twin):
    model = Scaled()
    graph = capture(twin, model, torch.ones(2, 2))
    graph.replay()
    empties_parameter(model)
    graph.poison()
    with pytest.raises(DeadTensorError, match=r"linear\.weight: float32 \(2, 2\)"):
        graph.replay()


def test_many_dead_tensors_are_named_in_a_few_lines(twin):
    layers = [nn.Linear(2, 2) for _ in range(4)]
    graph = capture(twin, nn.Sequential(*layers).forward, torch.ones(2, 2))
    layers.clear()
    with pytest.raises(DeadTensorError) as caught:
        graph.replay()
    text = str(caught.value).splitlines()
    assert len(text) == 8
    assert text[1].startswith("  0.weight: float32 (2, 2), read by aten.linear")
    assert text[6] == "  and 3 more"


def test_a_tensor_without_a_name_is_named_by_its_reader(twin):
    tables = [torch.ones(2)]
    graph = capture(twin, lambda x: x * tables[0], torch.ones(2))
    assert graph(torch.ones(2)).tolist() == [1, 1]
    tables[0] = torch.ones(2)
    with pytest.raises(DeadTensorError, match=r"\n  float32 \(2,\), read by aten\.mul, .*test_cpu_memory\.py:\d+ in"):
        graph.replay()


class Scheduled(Scaled):
    """As a sampler: its scheduler is no module, and keeps its steps on the host."""

    def __init__(self):
        super().__init__()
        self.scheduler = SimpleNamespace(steps=torch.tensor([2.0, 3.0]))

    def forward(self, x):
        for step in self.scheduler.steps:
            x = x * float(step)
        return x


def test_the_host_may_read_a_tensor_of_a_plain_object_on_the_model(twin):
    model = Scheduled()
    assert capture(twin, model, torch.ones(2))(torch.ones(2)).tolist() == [6, 6]


def test_memory_that_something_else_keeps_is_read_as_cuda_reads_it(twin):
    model = Scaled()
    kept = model.table
    graph = capture(twin, model, torch.ones(2, 2))
    wanted = graph.replay().clone()
    model.table = torch.full((2,), 9.0)
    assert torch.equal(graph.replay(), wanted)
    kept.zero_()
    assert torch.equal(graph.replay(), torch.ones(2, 2))


def test_a_view_keeps_the_memory_it_lies_in(twin):
    held = {"rows": torch.arange(6.0).view(3, 2)}
    graph = capture(twin, lambda x: x + held["rows"][1], torch.zeros(2))
    held["rows"] = held["rows"][2]
    assert graph.replay().tolist() == [2, 3]
    held.clear()
    with pytest.raises(DeadTensorError):
        graph.replay()


def test_what_the_recorded_call_frees_is_dead_at_the_first_replay(twin):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(2)

        def forward(self, x):
            self.total = self.total + x
            return self.total * 2

    graph = capture(twin, Grows(), torch.ones(2))
    with pytest.raises(DeadTensorError, match=r"total: float32 \(2,\), read by aten\.add"):
        graph.replay()


class Loud(torch.Tensor):
    """A subclass in Python alone, as users make them to count or to log."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Loud.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


TENSORS = {
    "complex conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "imaginary part of one": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "strided": lambda: torch.arange(8.0)[1:6:3],
    "expanded": lambda: torch.ones(1).expand(2),
    "half": lambda: torch.ones(2, dtype=torch.bfloat16),
    "boolean": lambda: torch.tensor([True, False]),
    "whole": lambda: torch.arange(2),
    "empty": lambda: torch.ones(2, 0),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "subclass": lambda: torch.ones(2).as_subclass(Loud),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_is_read_by_address(twin, name):
    held = TENSORS[name]()

    def model(x):
        return x.unsqueeze(1) * held if held.dim() == 2 else x * held

    graph = capture(twin, model, torch.ones(2))
    x = torch.tensor([2.0, 3.0])
    with torch.inference_mode():
        wanted = model(x)
    assert torch.equal(graph(x), wanted.as_subclass(torch.Tensor))
    calls = Loud.calls
    graph.replay()
    assert Loud.calls == calls


def test_a_tensor_that_is_written_by_address_is_written_where_it_lies(twin):
    total = torch.zeros(2)

    def model(x):
        return total.add_(x) * 1

    graph = capture(twin, model, torch.ones(2))
    after = (total + 1).tolist()
    assert graph.replay().tolist() == after
    assert total.tolist() == after

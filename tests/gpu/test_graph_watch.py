"""The watch of a program's own graphs: every capture and replay is in the ledger, and every trouble has its line."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.gpu.small_models import Mlp
from torch import nn

from pytest_cudagraph import graph_watch
from pytest_cudagraph.errors import InputError


class Runner:
    """A graph for each batch size, captured at its first call. Larger batches run eagerly."""

    def __init__(self, model, largest=4, *, keeps_input=True):
        self.model, self.largest, self.keeps_input = model, largest, keeps_input
        self.graphs = {}

    def __call__(self, x):
        rows = len(x)
        if rows > self.largest:
            return self.model(x)
        if rows not in self.graphs:
            self.graphs[rows] = self.capture(x)
        graph, static, output = self.graphs[rows]
        if static is not None:
            static.copy_(x)
        graph.replay()
        return output.clone()

    def capture(self, x):
        static = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.model(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(static)
        return graph, static if self.keeps_input else None, output


@pytest.fixture(autouse=True)
def without_autograd():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return Mlp().cuda().eval()


def rows(count):
    return torch.randn(count, 64, device="cuda")


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_the_ledger_has_each_graph_with_its_line_its_replays_and_its_memory(model):
    with graph_watch() as seen:
        run = Runner(model)
        for count in (1, 2, 1, 1):
            run(rows(count))
    assert [graph.replays for graph in seen.graphs] == [3, 1]
    assert {graph.site.line for graph in seen.graphs} == {line_of(Runner, "with torch.cuda.graph(graph)")}
    assert all(graph.operators and graph.pool_bytes >= 0 and graph.capture_ns > 0 for graph in seen.graphs)
    assert (seen.captures, seen.replays, seen.recaptures, seen.freed, seen.unknown_replays) == (2, 4, [], [], 0)


def test_a_graph_made_again_for_the_same_shapes_and_weights_is_a_recapture(model):
    with graph_watch() as seen:
        run = Runner(model)
        run(rows(2))
        run.graphs.clear()
        run(rows(2))
    assert [graph.number for graph in seen.recaptures] == [1]


def test_graphs_of_two_models_of_the_same_shapes_are_no_recapture(model):
    with graph_watch() as seen:
        for replica in (model, Mlp().cuda().eval()):
            Runner(replica)(rows(2))
    assert (seen.captures, seen.recaptures) == (2, [])


def test_a_replay_after_the_static_input_was_freed_names_the_operator_that_reads_it(model):
    with graph_watch() as seen:
        run = Runner(model, keeps_input=False)
        run(rows(2))
        run(rows(2))
    (graph,) = seen.freed
    assert graph.freed_replays == 2
    assert any(use.operator == "addmm" and use.size_bytes >= 2 * 64 * 4 for use in graph.freed)


def test_weights_that_were_replaced_are_memory_that_was_freed(model):
    with graph_watch() as seen:
        run = Runner(model)
        run(rows(2))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        run(rows(2))
    (graph,) = seen.freed
    assert graph.freed_replays == 1
    assert all(use.is_parameter for use in graph.freed)


def test_weights_that_were_written_in_place_are_no_trouble(model):
    with graph_watch() as seen:
        run = Runner(model)
        run(rows(2))
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        run(rows(2))
    assert not seen.freed


def test_a_refused_capture_keeps_its_error_and_is_in_the_ledger(model):
    class Reads(nn.Module):
        def forward(self, x):
            return model(x) * float(x.sum())

    run = Runner(Reads())
    with graph_watch() as seen, pytest.raises((RuntimeError, torch.AcceleratorError)):
        run(rows(2))
    (graph,) = seen.refused
    assert graph.failure
    assert seen.captures == 0
    assert len(Runner(model)(rows(2))) == 2


def test_a_marked_call_without_a_graph_is_eager_and_names_its_first_line(model):
    batches = {count: rows(count) for count in (2, 8)}
    with graph_watch() as seen:
        run = Runner(model)
        for count in (2, 2, 8):
            with seen.call(f"{count} rows"):
                run(batches[count])
    assert [call.kind for call in seen.calls] == ["capture", "replay", "eager"]
    (call,) = seen.eager_calls
    assert call.label == "8 rows"
    assert all(site is not None for site in call.sites.values())


def test_replays_of_graphs_from_before_the_watch_are_counted_as_unknown(model):
    run = Runner(model)
    with graph_watch():
        run(rows(2))
    with graph_watch() as seen:
        run(rows(2))
    assert (seen.unknown_replays, seen.replays) == (1, 1)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_graphed_callables_with_a_backward_use_no_freed_memory(model):
    with torch.enable_grad(), graph_watch() as seen:
        graphed = torch.cuda.make_graphed_callables(Mlp().cuda(), (rows(2).requires_grad_(),))
        for _ in range(2):
            graphed(rows(2).requires_grad_()).sum().backward()
    assert (seen.captures, seen.replays) == (2, 4)
    assert seen.freed == []


def test_nodes_are_counted_on_request_and_replays_are_right(model):
    x = rows(2)
    with graph_watch(nodes=True) as seen:
        replayed = Runner(model)(x)
    torch.testing.assert_close(replayed, model(x))
    (graph,) = seen.graphs
    assert graph.nodes is not None, graph.why_not_counted
    assert sum(graph.kernel_names.values()) <= graph.nodes


def test_the_methods_of_torch_are_back_after_an_exception():
    before = {name: getattr(torch.cuda.CUDAGraph, name) for name in ("capture_begin", "capture_end", "replay", "reset")}
    with pytest.raises(KeyError), graph_watch(nodes=True):
        raise KeyError("stopped")
    assert {name: getattr(torch.cuda.CUDAGraph, name) for name in before} == before
    assert "__init__" not in vars(torch.cuda.CUDAGraph)


def test_a_second_watch_is_refused():
    with graph_watch(), pytest.raises(InputError, match="one graph_watch at a time"), graph_watch():
        pass

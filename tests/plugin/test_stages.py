"""The stage fixtures, used in another order than the examples do, or with the wrong things."""

from __future__ import annotations

import pytest

STAGES = """
import pytest, torch
from models import *
from pytest_cudagraph import InputError

KEPT = {}

def test_a_compiled_model_is_captured_with_its_own_inputs(compile_model, capture_graphs, assert_replay_close):
    compiled = compile_model(Mlp().eval(), torch.randn(1, 16), mode="none", batch_sizes=[1, 3])
    graphs = capture_graphs(compiled)
    assert list(graphs) == [1, 3]
    assert_replay_close(graphs)
    with pytest.raises(InputError, match="compiled for batch sizes"):
        capture_graphs(compiled, batch_sizes=[7])

def test_two_compiled_models_have_names_of_their_own(compile_model, capture_graphs):
    for name in ("encoder", "decoder"):
        compiled = compile_model(Mlp().eval(), torch.randn(1, 16), mode="none", batch_sizes=[1], name=name)
        assert compiled.case.name == capture_graphs(compiled, name=name).case.name == name
    with pytest.raises(InputError) as refused:
        capture_graphs(compiled, name="another")
    assert str(refused.value) == (
        "the model was compiled under the name 'decoder' and is captured under it; "
        "found name='another': give it to compile_model"
    )

def test_a_graph_network_and_a_step_without_arguments_run_as_they_are(
    cudagraph, compile_model, capture_graphs, assert_replay_close
):
    def spread(nodes, edges):
        return torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])

    example, state = (torch.randn(5, 4), torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])), torch.ones(3)
    compiled = compile_model(spread, *example, batch_dim=None, mode="none", name="network")
    torch.testing.assert_close(compiled(*example), spread(*example))
    for graphs in (capture_graphs(compiled), capture_graphs(lambda: state.add_(1) * 2, name="step")):
        assert list(graphs) == [1]
        assert_replay_close(graphs)
    with pytest.raises(InputError, match="run as they are, at one batch size; here batch_dim is None for every"):
        cudagraph(spread, *example, batch_dim=None, batch_sizes=[1, 2], name="sizes")

def test_new_inputs_are_drawn_by_the_test(cudagraph, capture_graphs, assert_replay_close):
    def draw(generator):
        return torch.randn(2, 3, generator=generator), torch.randperm(5, generator=generator)[:2]

    def write(x, slots):
        return x.new_zeros(5, 3).index_copy(0, slots, x)

    assert_replay_close(capture_graphs(write, *draw(torch.Generator()), batch_sizes=[2]), draw=draw)
    with pytest.raises(InputError, match=r"args.1. is int64 .2,. there, found int64 .2, 1."):
        cudagraph(write, *draw(None), batch_sizes=[2], draw=[(torch.ones(2, 3), torch.ones(2, 1).long())], name="form")

def test_a_batch_size_there_is_none_of(capture_graphs):
    graphs = capture_graphs(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1])
    assert graphs.get(2) is None
    with pytest.raises(KeyError, match="no batch size 2; there are .1."):
        graphs[2]

def test_other_things_than_graphs(assert_replay_close, measure_speedup):
    with pytest.raises(InputError, match="the graphs that capture_graphs returned; found Mlp"):
        assert_replay_close(Mlp())
    with pytest.raises(InputError, match="the graphs that capture_graphs returned; found dict"):
        measure_speedup({1: Mlp()})

def test_keep(capture_graphs):
    KEPT["graphs"] = capture_graphs(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1])
"""

ENDED = """
def test_graphs_of_another_test(assert_replay_close, measure_speedup):
    for use in (assert_replay_close, measure_speedup, len, list, lambda graphs: graphs[1]):
        with pytest.raises(InputError, match="these graphs ended with the test that captured them"):
            use(KEPT["graphs"])
"""


MISTAKES = """
import torch
from models import *

def test_no_such_report(cudagraph):
    cudagraph(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1]).at(9)

def test_not_compiled(compile_model):
    compile_model(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1]).for_batch(9)

def test_no_such_size(capture_graphs):
    capture_graphs(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1])[3]

def test_another_shape(capture_graphs):
    capture_graphs(Mlp().eval(), torch.randn(1, 16), batch_sizes=[1])[1](torch.randn(3, 16))
"""


def test_a_mistake_with_graphs_is_shown_at_the_line_of_the_test(project):
    project.pytester.makepyfile(MISTAKES)
    result = project.run("--cudagraph", "--cudagraph-device=cpu")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "E*KeyError: 'no batch size 9; there are [[]1[]]'",
            "E*InputError: the model is not compiled for batch 9, only for: 1",
            "E*KeyError: 'no batch size 3; there are [[]1[]]'",
            "E*InputError: args[[]0[]]: the graph was captured for *",
        ]
    )
    assert "src/pytest_cudagraph" not in result.stdout.str()


@pytest.mark.parametrize("options", [[], ["--cudagraph", "--cudagraph-device=cpu"]], ids=["off", "on"])
def test_odd_orders_and_wrong_arguments_have_answers(project, options):
    project.pytester.makepyfile(STAGES + (ENDED if options else ""))
    project.run(*options).assert_outcomes(passed=7 + len(options) // 2)

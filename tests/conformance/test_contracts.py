"""What a graph does with the caller's tensors, on either device: rows of the catalogue that no module can trigger."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import InputError

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def backend(kind):
    return open_backend(kind)


@pytest.fixture
def pool(backend):
    with backend.pool() as pool:
        yield pool


@pytest.fixture
def layer(backend):
    return nn.Linear(4, 4, device=backend.device).eval()


def numbers(backend, rows=2):
    return torch.randn(rows, 4, device=backend.device)


def answer(backend, model, *args):
    with backend.running():
        return model(*args)


def test_row_28_a_call_copies_its_inputs_in_whatever_tensor_holds_them(backend, pool, layer):
    graph = pool.capture(layer, (numbers(backend),), {}, batch_size=2)
    for _ in range(3):
        x = numbers(backend)
        torch.testing.assert_close(graph(x), answer(backend, layer, x))


def test_row_28_a_replay_alone_reads_the_inputs_of_the_last_call(backend, pool, layer):
    graph = pool.capture(layer, (numbers(backend),), {}, batch_size=2)
    x = numbers(backend)
    wanted = answer(backend, layer, x)
    graph(x)
    x.mul_(2)
    torch.testing.assert_close(graph.replay(), wanted)


def test_row_31_inputs_may_be_freed_after_capture(backend, pool, layer):
    x = numbers(backend)
    graph = pool.capture(layer, (x,), {}, batch_size=2)
    del x
    gc.collect()
    filler = [numbers(backend) for _ in range(8)]
    torch.testing.assert_close(graph(filler[0]), answer(backend, layer, filler[0]))


def test_row_33_all_replays_return_the_same_memory(backend, pool, layer):
    graph = pool.capture(layer, (numbers(backend),), {}, batch_size=2)
    first = graph(numbers(backend))
    kept = first.clone()
    second = graph(numbers(backend))
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)
    assert not torch.equal(first, kept)


def test_row_33_the_output_of_a_capture_is_not_an_answer(backend, pool, layer):
    graph = pool.capture(layer, (numbers(backend),), {}, batch_size=2)
    graph.poison()
    x = numbers(backend)
    torch.testing.assert_close(graph(x), answer(backend, layer, x))


def test_row_36_a_model_that_writes_to_its_input_leaves_the_callers_tensor(backend, pool):
    graph = pool.capture(lambda x: x.add_(1) * 2, (numbers(backend),), {}, batch_size=2)
    x = numbers(backend)
    before = x.clone()
    for _ in range(2):
        torch.testing.assert_close(graph(x), (before + 1) * 2)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:1],
        lambda x: x.repeat(2, 1),
        lambda x: x.double(),
        lambda x: [x],
    ],
    ids=["fewer rows", "more rows", "another dtype", "another nesting"],
)
def test_row_39_another_shape_is_refused_and_nothing_runs(backend, pool, layer, other):
    graph = pool.capture(layer, (numbers(backend),), {}, batch_size=2)
    replays = graph.replays
    with pytest.raises(InputError, match="graph was captured"):
        graph(other(numbers(backend)))
    assert graph.replays == replays


def test_row_41_each_size_answers_rightly_in_any_order_when_its_answer_is_read_at_once(backend, pool, layer):
    graphs = {rows: pool.capture(layer, (numbers(backend, rows),), {}, batch_size=rows) for rows in (8, 4, 2)}
    for rows in (2, 8, 4, 8, 2, 2, 4):
        x = numbers(backend, rows)
        torch.testing.assert_close(graphs[rows](x).clone(), answer(backend, layer, x))


def test_row_41_a_copy_of_an_answer_outlives_the_replays_of_the_other_sizes(backend, pool, layer):
    graphs = {rows: pool.capture(layer, (numbers(backend, rows),), {}, batch_size=rows) for rows in (8, 4, 2)}
    kept, wanted = {}, {}
    for rows in graphs:
        x = numbers(backend, rows)
        kept[rows], wanted[rows] = graphs[rows](x).clone(), answer(backend, layer, x)
    assert all(torch.allclose(kept[rows], wanted[rows]) for rows in graphs)


def test_row_41_on_the_twin_the_answer_itself_never_does():
    layer = nn.Linear(4, 4).eval()
    with open_backend("cpu").pool() as pool:
        large, small = (pool.capture(layer, (torch.ones(rows, 4),), {}, batch_size=rows) for rows in (4, 2))
        kept = large(torch.ones(4, 4))
        small(torch.ones(2, 4))
        assert kept.isnan().all()


def test_rows_20_and_30_weights_changed_in_place_are_seen_under_autocast(backend, pool, layer):
    x = numbers(backend)
    with torch.autocast(torch.device(backend.device).type, dtype=torch.bfloat16):
        graph = pool.capture(layer, (x,), {}, batch_size=2)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.fill_(3)
        assert graph(x).eq(3).all()


def test_row_35_a_replay_moves_state_once_and_nothing_else_does(backend, pool):
    norm = nn.BatchNorm1d(4, device=backend.device).train()
    graph = pool.capture(norm, (numbers(backend),), {}, batch_size=2)
    norm.num_batches_tracked.zero_()
    graph(numbers(backend))
    assert norm.num_batches_tracked.item() == 1


def test_row_37_a_replay_runs_no_python_of_the_model(backend, pool):
    calls = []

    def model(x):
        calls.append(1)
        return x + 1

    graph = pool.capture(model, (numbers(backend),), {}, batch_size=2)
    before = len(calls)
    graph(numbers(backend))
    assert len(calls) == before

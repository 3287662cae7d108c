"""One graph per batch size from one pool: order, memory, and a model that is left as it was."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.sizes import large
from tests.gpu.small_models import Counts, Mlp

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.errors import InputError


def captured(pool, backend, model, examples):
    return capture_batches(lambda _: model, examples, pool, model=model, backend=backend)


def wide(backend):
    """A model and its input, of tens of MiB."""
    features = large(1024)
    return Mlp(features=features, width=large(4096)).cuda().eval(), torch.randn(1024, features, device=backend.device)


def keep_busy(square):
    """Queue some milliseconds of work of a GPU."""
    for _ in range(large(20)):
        square = square @ square / len(square)


def test_the_largest_batch_is_captured_first_and_every_graph_replays_what_eager_computes(backend, pool, examples):
    model, rows = Mlp().cuda().eval(), examples(1, 8, 4)
    captures = captured(pool, backend, model, rows)
    assert list(captures.graphs) == [8, 4, 1]
    assert captures.refused is None
    for size, graph in captures.graphs.items():
        fresh = torch.randn(size, 64, device=backend.device)
        torch.testing.assert_close(graph(fresh), model(fresh))
        assert graph.replays == 1


def test_warm_up_and_capture_leave_state_and_generators_bit_equal(backend, pool, examples):
    class Draws(Counts):
        def forward(self, x):
            return super().forward(x) + torch.rand_like(x)

    model, rows = Draws().cuda(), examples(2, 4)
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state().clone()
    captured(pool, backend, model, rows)
    assert model.steps.item() == 0
    assert not model.mean.any()
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_replay_moves_the_state_of_the_model(backend, pool, examples):
    model, rows = Counts().cuda(), examples(4)
    graph = captured(pool, backend, model, rows).graphs[4]
    for _ in range(3):
        graph(*rows[4].args)
    assert model.steps.item() == 3


def test_a_smaller_graph_fits_into_the_memory_the_larger_one_left(backend, reserved, examples):
    features, width = large(1024), large(8192)
    model = Mlp(features=features, width=width).cuda().eval()
    small, big = large(2048), large(4096)
    rows = examples(small, big, features=features)
    with backend.pool() as alone:
        small_alone = captured(alone, backend, model, {small: rows[small]}).graphs[small].receipt.memory_bytes
    reserved()
    with backend.pool() as shared:
        graphs = captured(shared, backend, model, rows).graphs
        assert graphs[big].receipt.memory_bytes > small_alone
        assert graphs[small].receipt.memory_bytes < small_alone / 4


def test_the_memory_of_a_graph_is_the_growth_of_what_torch_has_reserved(backend, capture, reserved, pool):
    model, row = wide(backend)
    capture(model, row[:1])  # whatever libraries keep for good is there afterwards
    before = reserved()
    graph = capture(model, row)
    static_input_bytes = row.untyped_storage().nbytes()
    grown = reserved() - before
    of_pool = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool._handle)
    )
    assert graph.receipt.memory_bytes <= of_pool
    # The buffers inputs are copied into lie outside of the pool; the allocator rounds either to its segments.
    assert abs(grown - graph.receipt.memory_bytes) <= static_input_bytes + 24 * 2**20


def test_a_closed_pool_gives_its_memory_back(backend, reserved):
    model, row = wide(backend)
    with backend.pool() as warm:
        warm.capture(model, (row,), {}, batch_size=len(row))
    before = reserved()
    with backend.pool() as pool:
        pool.capture(model, (row,), {}, batch_size=len(row))
        assert reserved() > before
    assert reserved() == before


def test_many_pools_one_after_the_other_hold_nothing(backend, reserved):
    model, row = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    levels = []
    for _ in range(12):
        with backend.pool() as pool:
            pool.capture(model, (row,), {}, batch_size=8).replay()
        levels.append(reserved())
    assert levels[-1] == levels[2]


def test_random_numbers_advance_with_each_replay_and_follow_the_seed(capture, copied):
    noise = torch.nn.Dropout(0.5).train()
    x = torch.ones(4096, device="cuda")
    graph = capture(lambda x: noise(x) + torch.rand_like(x), x)
    torch.manual_seed(7)
    first, second = copied(graph(x)), copied(graph(x))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(graph(x), first)
    torch.manual_seed(7)
    with torch.inference_mode():
        assert torch.equal(noise(x) + torch.rand_like(x), first)


def test_replays_and_eager_draw_from_one_generator_in_turn(capture, copied):
    x = torch.ones(1024, device="cuda")
    graph = capture(torch.rand_like, x)
    torch.manual_seed(7)
    eager = [torch.rand_like(x) for _ in range(4)]
    torch.manual_seed(7)
    mixed = [copied(graph(x)), torch.rand_like(x), copied(graph(x)), torch.rand_like(x)]
    for one, other in zip(eager, mixed, strict=True):
        assert torch.equal(one, other)


def test_parameters_changed_in_place_are_seen(capture):
    layer, x = torch.nn.Linear(16, 4).cuda(), torch.randn(2, 16, device="cuda")
    graph = capture(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.zero_()
    torch.testing.assert_close(graph(x), layer(x).detach())


def test_parameters_replaced_through_data_are_not_seen(capture, copied):
    layer, x = torch.nn.Linear(16, 4).cuda(), torch.randn(2, 16, device="cuda")
    graph = capture(layer, x)
    held, before = layer.weight.data, copied(graph(x))  # held, so that its memory is not given to another tensor
    layer.weight.data = torch.zeros_like(held)
    assert torch.equal(graph(x), before)
    assert not torch.allclose(layer(x), before)


def test_a_replay_is_ordered_after_what_the_callers_stream_has_queued(backend, capture, orders):
    graph = capture(lambda x: x * 2, torch.zeros(1 << 20, device="cuda"))
    busy = torch.randn(large(4096), large(4096), device="cuda")
    for order in orders:
        stream = torch.cuda.Stream()
        backend.synchronize()  # the capture's own work was on other streams
        with order, torch.cuda.stream(stream):
            x = torch.zeros(1 << 20, device="cuda")
            keep_busy(busy)
            x.add_(3)
            seen = graph(x).clone()
            stream.synchronize()
        assert seen.eq(6).all()


def test_one_stream_can_be_ordered_after_another_between_two_calls_of_a_graph(backend, capture, copied, orders):
    graph = capture(lambda x: x * 2, torch.zeros(1 << 20, device="cuda"))
    busy, first = torch.randn(large(4096), large(4096), device="cuda"), torch.ones(1 << 20, device="cuda")
    for order in orders:
        with order:
            backend.synchronize()
            one, other = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(one):
                output = graph(first)
                keep_busy(busy)  # the other call would overwrite the output meanwhile
                seen = copied(output)
                earlier = backend.order_after(None)
            with torch.cuda.stream(other):
                backend.order_after(earlier)
                seen_after = copied(graph(first * 5))
            backend.synchronize()
        assert seen.eq(2).all()
        assert seen_after.eq(10).all()


def test_inputs_on_the_cpu_are_refused_by_name(capture):
    with pytest.raises(InputError, match=r"args\[0\]: a graph on cuda:\d takes tensors on cuda:\d"):
        capture(lambda x: x + 1, torch.ones(4))


def test_inputs_of_another_shape_are_refused_and_nothing_is_launched(capture):
    graph = capture(lambda x: x + 1, torch.ones(4, device="cuda"))
    with pytest.raises(InputError, match=r"\(4,\) on cuda:\d; this call gives float32 \(3,\)"):
        graph(torch.ones(3, device="cuda"))
    assert graph.replays == 0


def test_capture_under_autocast_sees_new_weights(capture):
    layer, x = torch.nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        graph = capture(layer, x)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.fill_(3)
        assert graph(x).eq(3).all()


def test_poison_reaches_an_expanded_output_and_a_replay_brings_it_back(capture):
    x = torch.ones(4, device="cuda")
    graph = capture(lambda x: (x + 1).expand(3, 4), x)
    graph.poison()
    assert graph._output.isnan().all()
    assert graph(x).eq(2).all()


def test_uninitialised_memory_that_torch_fills_is_filled_in_the_graph_too(capture, copied):
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        x = torch.ones(64, device="cuda")
        graph = capture(lambda x: torch.empty_like(x), x)
        assert graph(x).isnan().all()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_inputs_of_several_dtypes_are_copied_in_together(capture):
    x, y = torch.ones(8, device="cuda"), torch.arange(8, device="cuda")
    half, flags = torch.ones(8, device="cuda", dtype=torch.float16), torch.ones(8, device="cuda", dtype=torch.bool)
    graph = capture(lambda x, y, half, flags: torch.where(flags, x + y + half, 0.0), x, y, half, flags)
    assert torch.equal(graph(x * 2, y * 3, half, ~flags), torch.zeros_like(x))
    assert torch.equal(graph(x * 2, y * 3, half, flags), x * 2 + y * 3 + 1)


def test_inference_tensors_can_be_given_in_any_mode(capture):
    with torch.inference_mode():
        made_inside = torch.ones(8, device="cuda") * 3
    graph = capture(lambda x: x + 1, made_inside)
    assert graph(made_inside).eq(4).all()
    with torch.inference_mode():
        assert graph(made_inside * 2).eq(7).all()


def test_a_capture_without_other_threads_uses_the_strictest_mode_and_is_captured(capture):
    # Which mode was used is told by the unit tests; here the strict one must not refuse what is harmless.
    graph = capture(lambda x: torch.nn.functional.softmax(x @ x, -1), torch.randn(16, 16, device="cuda"))
    assert graph.replay().isfinite().all()

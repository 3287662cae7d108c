"""Faults of order in the CUDA backend, planted one by one: each shows as a wrong number or as an error.

Work of the emulated device waits in its stream's queue, and a seed chooses among the orders that CUDA allows. A GPU
mostly runs work at once and hides such faults.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.buffers import StaticInputs, poison
from pytest_cudagraph.backends.cuda.backend import CudaBackend
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.pool import CudaCapturedGraph
from pytest_cudagraph.errors import CudagraphError

cuda_emulator = pytest.importorskip("cuda_emulator", reason="needs the emulated CUDA device: it chooses the order")

SEEDS = range(12)
MORE_SEEDS = range(60)
"""Some faults show in few orders. The first seed that shows one is enough."""
ROWS, FEATURES = 64, 256


class Scaled(nn.Module):
    """Computes its factor from its weight at the first call, as lazy caches do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.factor = None

    def forward(self, rows):
        if self.factor is None:
            self.factor = self.weight * 2
        return rows * self.factor


class Noisy(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, rows):
        return rows + torch.rand(rows.shape, device=rows.device, generator=self.generator)


def rows(value):
    return torch.full((ROWS, FEATURES), float(value), device="cuda")


def is_all(tensor, value):
    return bool((tensor == value).all().item())


def doubled(rows):
    return rows * 2


# What users do. Each returns whether every number is right.


def replays_new_inputs():
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(doubled, (rows(1),), {}, batch_size=ROWS)
        return all(is_all(graph(rows(value)), 2 * value) for value in (3, 4))


def keeps_the_example():
    example = rows(1)
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(doubled, (example,), {}, batch_size=ROWS)
        return is_all(graph(rows(3)), 6) and is_all(example, 1)


def replays_on_a_side_stream():
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(doubled, (rows(1),), {}, batch_size=ROWS)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return is_all(graph(rows(3)), 6)


def serves_from_two_streams():
    backend = open_backend("cuda")
    with backend.pool() as pool:
        graph = pool.capture(doubled, (rows(1),), {}, batch_size=ROWS)
        streams, earlier, answers = [torch.cuda.Stream(), torch.cuda.Stream()], None, []
        for value in range(6):
            with torch.cuda.stream(streams[value % 2]):
                fresh = rows(value)
                earlier = backend.order_after(earlier)
                answers.append(graph(fresh).clone())
        torch.cuda.synchronize()
        return all(is_all(answer, 2 * value) for value, answer in enumerate(answers))


def captures_a_lazy_cache():
    model = Scaled().cuda()
    with torch.no_grad():
        model.weight.fill_(3)
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(model, (rows(1),), {}, batch_size=ROWS)
        return is_all(graph(rows(2)), 12)


def closes_while_a_replay_waits():
    torch.cuda.empty_cache()  # so that what the graph gives back is used again at once
    side = torch.cuda.Stream()
    pool = open_backend("cuda").pool()
    graph = pool.capture(doubled, (rows(1),), {}, batch_size=ROWS)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph(rows(3))
        answer = [graph.replay() for _ in range(10)][-1].clone()
    given_back = graph._inputs.tensors[0].data_ptr()
    pool.close()
    taken = [rows(0)]
    while taken[-1].data_ptr() != given_back and len(taken) < 5000:
        taken.append(rows(0))
    torch.cuda.current_stream().wait_stream(side)
    return is_all(answer, 6)


def checks_a_poisoned_graph():
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(doubled, (rows(1),), {}, batch_size=ROWS)
        right = True
        for value in range(5):
            graph.poison()
            right &= is_all(graph(rows(value)), 2 * value)
        return right


def waits_for_the_device():
    backend, pinned = open_backend("cuda"), torch.zeros(FEATURES).pin_memory()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pinned.copy_(torch.ones(FEATURES, device="cuda"), non_blocking=True)
    backend.synchronize()
    return bool((pinned == 1).all())


def times_with_events():
    rows(1)
    return open_backend("cuda").event_timer().time_ns(lambda: rows(2) * 3) >= 0


def draws_as_eager_does():
    generator = torch.Generator("cuda:0").manual_seed(7)
    model = Noisy(generator)
    with open_backend("cuda").pool() as pool:
        graph = pool.capture(model, (rows(0),), {}, batch_size=ROWS)
        replayed = graph(rows(0)).clone()
        generator.manual_seed(7)
        return bool(torch.equal(replayed, model(rows(0))))


# The faults. Each is a patch of one place.


def another_stream():
    """Another stream than the one that is current."""
    return torch.cuda.stream(torch.cuda.Stream())


def warm_up_does_not_wait_for_the_caller(patch):
    @contextmanager
    def unordered(gpu):
        with gpu.cuda.stream(gpu.stream):
            yield
        gpu.current_stream().wait_stream(gpu.stream)

    patch.setattr(Gpu, "on_capture_stream", unordered)


def streams_are_not_ordered(patch):
    patch.setattr(CudaBackend, "order_after", lambda backend, earlier: backend._gpu.current_stream())


def copy_in_runs_on_another_stream(patch):
    copy_in = StaticInputs.copy_in

    def elsewhere(self, args, kwargs):
        with another_stream():
            copy_in(self, args, kwargs)

    patch.setattr(StaticInputs, "copy_in", elsewhere)


def replay_precedes_copy_in(patch):
    def call(graph, *args, **kwargs):
        output = graph.replay()
        graph._inputs.copy_in(args, kwargs)
        return output

    patch.setattr(CudaCapturedGraph, "__call__", call)


def copy_in_is_left_out(patch):
    patch.setattr(CudaCapturedGraph, "__call__", lambda graph, *args, **kwargs: graph.replay())


def replay_runs_on_another_stream(patch):
    replay = CudaCapturedGraph.replay

    def elsewhere(graph):
        with another_stream():
            return replay(graph)

    patch.setattr(CudaCapturedGraph, "replay", elsewhere)


def replay_runs_on_the_default_stream(patch):
    replay = CudaCapturedGraph.replay

    def elsewhere(graph):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return replay(graph)

    patch.setattr(CudaCapturedGraph, "replay", elsewhere)


def close_does_not_wait(patch):
    patch.setattr(Gpu, "synchronize", lambda gpu: None)


def poison_runs_on_another_stream(patch):
    def elsewhere(tensor):
        with another_stream():
            poison(tensor)

    patch.setattr("pytest_cudagraph.backends.cuda.pool.poison", elsewhere)


def synchronize_waits_for_one_stream(patch):
    patch.setattr(Gpu, "synchronize", lambda gpu: gpu.current_stream().synchronize())


def timer_does_not_wait(patch):
    class Impatient(torch.cuda.Event):
        def synchronize(self):
            pass

    patch.setattr(torch.cuda, "Event", Impatient)


def static_inputs_are_the_examples_own(patch):
    patch.setattr("pytest_cudagraph.backends.buffers._own_copy", lambda tensor: tensor)


def generators_are_not_registered(patch):
    patch.setattr("pytest_cudagraph.backends.cuda.gpu.register", lambda graph, generators: None)


def warm_up_moves_the_generator(patch):
    patch.setattr("pytest_cudagraph.backends.cuda.pool.states_kept", lambda generators: nullcontext())


FAULTS = {
    warm_up_does_not_wait_for_the_caller: captures_a_lazy_cache,
    streams_are_not_ordered: serves_from_two_streams,
    copy_in_runs_on_another_stream: replays_new_inputs,
    replay_precedes_copy_in: replays_new_inputs,
    copy_in_is_left_out: replays_new_inputs,
    replay_runs_on_another_stream: replays_new_inputs,
    replay_runs_on_the_default_stream: replays_on_a_side_stream,
    close_does_not_wait: closes_while_a_replay_waits,
    poison_runs_on_another_stream: checks_a_poisoned_graph,
    synchronize_waits_for_one_stream: waits_for_the_device,
    timer_does_not_wait: times_with_events,
    static_inputs_are_the_examples_own: keeps_the_example,
    generators_are_not_registered: draws_as_eager_does,
    warm_up_moves_the_generator: draws_as_eager_does,
}


def outcome(scenario, seed):
    """``right``, ``wrong``, or the name of the error, which a user sees too."""
    try:
        with cuda_emulator.asynchronous(seed):
            is_right = scenario()
            torch.cuda.synchronize()
    except (RuntimeError, CudagraphError) as error:
        return type(error).__name__
    return "right" if is_right else "wrong"


@pytest.mark.parametrize("scenario", dict.fromkeys(FAULTS.values()), ids=lambda scenario: scenario.__name__)
def test_without_a_fault_every_order_gives_the_right_numbers(scenario):
    assert {seed: outcome(scenario, seed) for seed in SEEDS} == dict.fromkeys(SEEDS, "right")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_shows(fault, monkeypatch):
    fault(monkeypatch)
    assert any(outcome(FAULTS[fault], seed) != "right" for seed in MORE_SEEDS)

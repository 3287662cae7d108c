"""A backend whose graphs run eager and misbehave on request, and the check on such graphs."""

from __future__ import annotations

import random

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.values import Receipt


class FakeGraph:
    """Runs ``model`` and copies its answer into buffers of its own, as a replay does."""

    def __init__(self, model, *, batch_size=2, opaque_regions=0):
        self.model, self.replays, self.closed = model, 0, False
        self.receipt = Receipt(batch_size=batch_size, operations=1, kernels=1, opaque_regions=opaque_regions)
        self.buffers = None

    def __call__(self, *args, **kwargs):
        self.replays += 1
        return self.written(self.answer(*args, **kwargs))

    def answer(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def written(self, output):
        """The graph's own buffers, holding ``output``."""
        if self.buffers is None:
            self.buffers = pytree.map_tensors(lambda tensor: torch.empty_like(tensor), output)
        found, _ = pytree.flatten(output)
        held, structure = pytree.flatten(self.buffers)
        for own, new in zip(held, found, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new)
        mixed = [own if isinstance(own, torch.Tensor) else new for own, new in zip(held, found, strict=True)]
        return pytree.unflatten(structure, mixed)

    def poison(self):
        for tensor in pytree.tensors_in(self.buffers):
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -77)

    def close(self):
        self.closed = True


class DoesNothing(FakeGraph):
    """Returns its buffers and computes nothing."""

    def __init__(self, model, example_output, **options):
        super().__init__(model, **options)
        self.buffers = pytree.map_tensors(torch.clone, example_output)

    def __call__(self, *args, **kwargs):
        self.replays += 1
        return self.buffers


class NeverLaunches(FakeGraph):
    """The right answer without a replay: a silent fall-back to eager."""

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class AnswersPrevious(FakeGraph):
    """Reads its inputs before the new ones are there."""

    def __init__(self, model, args, **options):
        super().__init__(model, **options)
        self.previous = args

    def answer(self, *args, **kwargs):
        previous, self.previous = self.previous, args
        return self.model(*previous, **kwargs)


class AnswersCapture(FakeGraph):
    """Never reads a new input."""

    def __init__(self, model, args, **options):
        super().__init__(model, **options)
        self.captured = args

    def answer(self, *args, **kwargs):
        return self.model(*self.captured, **kwargs)


class AddsNoise(FakeGraph):
    """Off by ``amount`` in the last element of each float output."""

    def __init__(self, model, amount, **options):
        super().__init__(model, **options)
        self.amount = amount

    def answer(self, *args, **kwargs):
        return pytree.map_tensors(self._disturbed, self.model(*args, **kwargs))

    def _disturbed(self, tensor):
        disturbed = tensor.clone()
        disturbed.view(-1)[-1] += self.amount
        return disturbed


class FakeBackend:
    """CPU, eager, no graphs of its own."""

    kind, device = "cpu", "cpu"

    def __init__(self):
        self.synchronized = 0

    def synchronize(self):
        self.synchronized += 1

    def running(self):
        return torch.inference_mode()

    def rng_state(self, *roots):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)


class Trembling(torch.nn.Module):
    """Eager that is not repeatable: rounding-sized noise from a source that no seed reaches."""

    def __init__(self, amount):
        super().__init__()
        self.amount, self._source = amount, random.Random(1)

    def forward(self, x):
        return x + self.amount * self._source.random()


def check_graphs(model, graphs, examples, *, kwargs=None, captured=None, **options):
    """The verdict by batch size; each example is the tuple of the positional arguments."""
    return check_replays(
        graphs,
        lambda _: model,
        {size: Example(args=args, kwargs=kwargs or {}) for size, args in examples.items()},
        model=model,
        captured_for=(lambda _: captured) if captured else None,
        **{"backend": FakeBackend(), "seed": 7} | options,
    )


def check_one(model, graph, *args, **options):
    """The verdict on one graph of batch size 2."""
    return check_graphs(model, {2: graph}, {2: args or (torch.randn(2, 3),)}, **options)[2]

"""One call of a runner beside one of eager, from the same state and on the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.check.compare import Tolerance, compare, rounding_limit
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.own_graphs.memory import is_inside, poison_free_blocks, pool_ranges
from pytest_cudagraph.own_graphs.trouble import Trouble, dead_memory, overwritten_output, raises, unused_argument, wrong
from pytest_cudagraph.own_graphs.watch import GraphWatch
from pytest_cudagraph.state import Snapshot

_HELD = 4
"""Outputs that are looked at again after later calls."""

OutputRule = Literal["kept", "borrowed"]
"""Whether an output stays as it is after later calls, or is lent until the next call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a proof is about."""

    eager: Callable[..., Any]
    examples: Mapping[int, Example]
    """One example per batch size, on the device."""
    outputs: OutputRule = "kept"
    reset: Callable[[], object] | None = None
    """Brings runner and model back to a state in which they may start anew."""
    between: Callable[[], object] | None = None
    """The program's own step between replays: a weight update, a switch of adapters, a plan."""
    steps: int | None = None
    """Calls in a row from one state. None: 16 where eager writes its state, else none."""
    threads: int = 0
    """Threads that call the runner at the same time. 0: one thread."""
    streams: bool = False
    """Whether callers may use streams of their own."""
    max_growth_bytes: int = 0
    tolerance: Tolerance = field(default_factory=Tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """What one call returned."""

    leaves: tuple[Any, ...]
    """As returned."""
    copies: tuple[Any, ...]


class Trials:
    """Calls of a runner, each compared with eager. The first difference is a :class:`Trouble` with its cause."""

    def __init__(self, claim: Claim, runner: Callable[..., Any], watch: GraphWatch) -> None:
        self._claim, self.runner, self._watch = claim, runner, watch
        self.state = Snapshot.take(claim.eager)
        """What both begin from."""
        self.held: list[tuple[str, CallOutput]] = []
        self.count = 0
        self._seed = 0

    def fresh(self, size: int, like: Any = "random") -> Example:
        self._seed += 1
        return inputs.fresh(self._claim.examples[size], self._seed, like=like)

    def attempt(self, label: str, example: Example) -> None:
        """One call of the runner against one of eager, from the same state and on the same values."""
        self.count += 1
        self.restart()
        expected = self.call(self._claim.eager, example)
        self.restart()
        self._poison()
        with self._watch.call(label) as call:
            replayed = self.call(self.runner, example)
        self._look_at_held(label)
        self.held = [*self.held[-_HELD:], (label, replayed)]
        if self._watch.freed:
            raise dead_memory(self._watch.freed[0])
        try:
            self.compare_results(f"{label} ({call.kind})", expected, replayed)
        except Trouble as trouble:
            name = self._argument_without_influence(example)
            raise (unused_argument(name, trouble) if name else trouble) from None

    def restart(self) -> None:
        self.state.restore()
        if self._claim.reset is not None:
            self._claim.reset()

    def call(self, function: Callable[..., Any], example: Example) -> CallOutput:
        arguments = inputs.clone(example)
        torch.manual_seed(self._seed)  # a graph takes its random numbers from torch's generator, as eager does
        with torch.no_grad():
            try:
                result = function(*arguments.args, **arguments.kwargs)
            except Exception as error:
                if function is self.runner:
                    raise raises(error) from error
                raise
            leaves = tuple(pytree.flatten(result)[0])
            copies = tuple(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
            torch.cuda.synchronize()
            for tensor in inputs.named_tensors(arguments).values():  # whoever reads it later reads NaN
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        return CallOutput(leaves=leaves, copies=copies)

    def _poison(self) -> None:
        poison_free_blocks()
        if self._claim.outputs != "borrowed" or not self.held:
            return
        ranges = pool_ranges()
        for leaf in self.held[-1][1].leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and is_inside(leaf.data_ptr(), ranges):
                with torch.inference_mode(leaf.is_inference()), torch.no_grad():
                    leaf.detach().fill_(float("nan"))

    def _look_at_held(self, label: str) -> None:
        if self._claim.outputs != "kept":
            return
        for earlier, result in self.held:
            for leaf, copy in zip(result.leaves, result.copies, strict=True):
                if isinstance(leaf, torch.Tensor) and not pytree.same_bits(leaf.detach(), copy):
                    raise overwritten_output(earlier, label)

    def compare_results(self, label: str, expected: CallOutput, replayed: CallOutput) -> None:
        if len(expected.copies) != len(replayed.copies):
            raise wrong(label, f"{len(replayed.copies)} outputs where eager gives {len(expected.copies)}")
        for place, (one, other) in enumerate(zip(expected.copies, replayed.copies, strict=True)):
            words = self._difference(one, other)
            if words:
                raise wrong(label, f"output {place}: {words[0]}", words[1])

    def _difference(self, one: Any, other: Any) -> tuple[str, tuple[str, ...]] | None:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            tolerance = self._claim.tolerance
            # The runner may compute in other shapes, padded ones: each layer then rounds in another way.
            noise = rounding_limit(one, tolerance) / 2 if tolerance.rtol is None else 0.0
            return compare(one, other, tolerance, noise)
        return (
            None if type(one) is type(other) and one == other else (f"{other!r:.60} where eager gives {one!r:.60}", ())
        )

    def _argument_without_influence(self, example: Example) -> str:
        """The first argument that changes what eager computes and not what the runner computes."""
        for name in inputs.named_tensors(example):
            other = inputs.clone(example)
            self._seed += 1
            drawn = inputs.named_tensors(inputs.fresh(example, self._seed))[name]
            inputs.named_tensors(other)[name].copy_(drawn)
            moves = [self._is_moved(function, example, other) for function in (self._claim.eager, self.runner)]
            if moves == [True, False]:
                return name
        return ""

    def _is_moved(self, function: Callable[..., Any], one: Example, other: Example) -> bool:
        first, second = (self.sequence(function, [example])[0] for example in (one, other))
        pairs = zip(first.copies, second.copies, strict=True)
        return any(isinstance(a, torch.Tensor) and not pytree.same_bits(a, b) for a, b in pairs)

    def sequence(self, function: Callable[..., Any], examples: list[Example]) -> list[CallOutput]:
        self.restart()
        return [self.call(function, example) for example in examples]

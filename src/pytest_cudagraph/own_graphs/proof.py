"""Prove that a runner which captures its own graphs computes what eager computes.

The runner is opaque: only its calls are seen, and what the watch tells of its graphs. The first trouble ends the proof,
because it often causes the next ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.check.compare import Tolerance, compare, rounding_limit
from pytest_cudagraph.check.weight_change import changed
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.own_graphs.ledger import WatchedCall
from pytest_cudagraph.own_graphs.memory import is_inside, poison_free_blocks, pool_ranges, reserved_bytes
from pytest_cudagraph.own_graphs.trouble import (
    Trouble,
    baked_scalar,
    dead_memory,
    eager_fallback,
    memory_growth,
    no_graph,
    overwritten_output,
    raises,
    recaptures,
    stale_weights,
    unused_argument,
    wrong,
)
from pytest_cudagraph.own_graphs.watch import GraphWatch

OutputRule = Literal["kept", "borrowed"]
"""Whether an output stays as it is after later calls, or is lent until the next call."""

_ROUNDS = 2
_STEPS = 16
_HELD = 4
"""Outputs that are looked at again after later calls."""


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
class _Result:
    leaves: tuple[Any, ...]
    """As returned."""
    copies: tuple[Any, ...]


class Proof:
    """One proof. ``run`` goes through the phases and raises the first :class:`Trouble`."""

    def __init__(self, claim: Claim, runner: Callable[..., Any], watch: GraphWatch) -> None:
        self._claim, self._runner, self._watch = claim, runner, watch
        self._state = state.Snapshot.take(claim.eager)
        self._seed = 0
        self._held: list[tuple[str, _Result]] = []
        self.trials = 0

    @property
    def _sizes(self) -> list[int]:
        return sorted(self._claim.examples)

    def run(self) -> None:
        """All phases. Raises :class:`~pytest_cudagraph.own_graphs.trouble.Trouble` for the first that fails."""
        for size in self._sizes:  # here the runner may capture
            for _ in range(2):
                self._try(f"batch {size}", self._fresh(size))
        if not self._watch.captures:
            raise no_graph(self._watch)
        self._steady()
        self._in_a_row()
        self._with_other_weights()
        self._after_between()
        self._on_a_stream()
        self._in_threads()

    # ---- phases
    def _steady(self) -> None:
        """From here on every size was called before: no capture, no eager call, no more memory."""
        first_call, captures, before_bytes = len(self._watch.calls), len(self._watch.graphs), reserved_bytes()
        for label, example in self._steady_calls():
            self._try(label, example)
        self._held.clear()
        grown_bytes = reserved_bytes() - before_bytes
        calls = self._watch.calls[first_call:]
        if len(self._watch.graphs) > captures:
            raise recaptures(self._watch.graphs[captures:], len(calls))
        lost = [call for call in calls if call.kind == "eager"]
        if lost:
            raise eager_fallback(lost, len(calls))
        if grown_bytes > self._claim.max_growth_bytes:
            raise memory_growth(grown_bytes, len(calls), self._claim.max_growth_bytes)

    def _steady_calls(self) -> Iterator[tuple[str, Example]]:
        order = random.Random(0)
        for _ in range(_ROUNDS):
            for size in order.sample(self._sizes, len(self._sizes)):
                yield f"batch {size}", self._fresh(size)
        largest = self._sizes[-1]
        for like in ("zeros", "large", "permuted"):
            yield f"batch {largest}, {like} values", self._fresh(largest, like=like)
        for size in self._sizes[:-1]:  # what the largest call leaves in the buffers must reach no smaller one
            self._call_with_nan(largest)
            yield f"batch {size} after a batch {largest} of NaN", self._fresh(size)

    def _call_with_nan(self, size: int) -> None:
        example = self._fresh(size)
        for tensor in inputs.named_tensors(example).values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self._restart()
        self._run(self._runner, example)
        self._watch.calls.append(WatchedCall(label="NaN", replays=1))

    def _in_a_row(self) -> None:
        """Several calls from one state: what a call leaves, the next ones read."""
        steps = self._claim.steps
        if steps is None:
            steps = _STEPS if self._writes_state() else 0
        order = random.Random(1)
        examples = [self._fresh(order.choice(self._sizes)) for _ in range(steps)]
        expected = self._sequence(self._claim.eager, examples)
        replayed = self._sequence(self._runner, examples)
        for number, (one, other) in enumerate(zip(expected, replayed, strict=True), 1):
            self._compare(f"call {number} of {len(examples)} in a row", one, other)

    def _writes_state(self) -> bool:
        self._restart()
        before = {name: value.clone() for name, value in self._state.live().items()}
        self._run(self._claim.eager, self._fresh(self._sizes[-1]))
        now = self._state.live()
        return any(name not in now or not pytree.same_bits(value, now[name]) for name, value in before.items())

    def _sequence(self, function: Callable[..., Any], examples: list[Example]) -> list[_Result]:
        self._restart()
        return [self._run(function, example) for example in examples]

    def _with_other_weights(self) -> None:
        """A graph reads weights where they lie, so a change in place must reach it."""
        weights = [each for each in self._state.live().values() if isinstance(each, torch.nn.Parameter)]
        if not weights:
            return
        saved = self._state
        with torch.no_grad(), changed(weights):
            self._state = state.Snapshot.take(self._claim.eager)
            try:
                self._try_ends("weights changed in place", stale_weights)
            finally:
                saved, self._state = self._state, saved
                del saved

    def _after_between(self) -> None:
        if self._claim.between is None:
            return
        before = {name: value.clone() for name, value in self._state.live().items()}
        addresses = {name: value.data_ptr() for name, value in self._state.live().items()}
        self._claim.between()
        self._state = state.Snapshot.take(self._claim.eager)
        now = self._state.live()
        moved = any(
            name not in before or value.data_ptr() != addresses[name] or not pytree.same_bits(value, before[name])
            for name, value in now.items()
        )
        self._try_ends("after between()", stale_weights if moved else baked_scalar)

    def _try_ends(self, label: str, cause: Callable[[str, Trouble], Trouble]) -> None:
        """The smallest and the largest size. A difference here has a known cause."""
        for size in dict.fromkeys((self._sizes[0], self._sizes[-1])):
            try:
                self._try(f"batch {size}, {label}", self._fresh(size))
            except Trouble as trouble:
                if trouble.finding.id != "wrong":
                    raise
                raise cause(label, trouble) from None

    def _on_a_stream(self) -> None:
        if not self._claim.streams:
            return
        for size in self._sizes:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                self._try(f"batch {size} on a stream of the caller", self._fresh(size))

    def _in_threads(self) -> None:
        count = self._claim.threads
        if count < 2:
            return
        examples = [[self._fresh(size) for size in self._sizes] for _ in range(count)]
        expected = [[self._run(self._claim.eager, example) for example in own] for own in examples]
        failures: list[BaseException] = []

        def serve(own: list[Example], wanted: list[_Result]) -> None:
            try:
                for example, result in zip(own, wanted, strict=True):
                    self._compare(f"one of {count} threads", result, self._run(self._runner, example))
            except BaseException as error:  # told by the thread that waits
                failures.append(error)

        threads = [threading.Thread(target=serve, args=pair) for pair in zip(examples, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    # ---- one call
    def _fresh(self, size: int, like: Any = "random") -> Example:
        self._seed += 1
        return inputs.fresh(self._claim.examples[size], self._seed, like=like)

    def _try(self, label: str, example: Example) -> None:
        """One call of the runner against one of eager, from the same state and on the same values."""
        self.trials += 1
        self._restart()
        expected = self._run(self._claim.eager, example)
        self._restart()
        self._poison()
        with self._watch.call(label) as call:
            replayed = self._run(self._runner, example)
        self._look_at_held(label)
        self._held = [*self._held[-_HELD:], (label, replayed)]
        if self._watch.freed:
            raise dead_memory(self._watch.freed[0])
        try:
            self._compare(f"{label} ({call.kind})", expected, replayed)
        except Trouble as trouble:
            name = self._argument_without_influence(example)
            raise (unused_argument(name, trouble) if name else trouble) from None

    def _restart(self) -> None:
        self._state.restore()
        if self._claim.reset is not None:
            self._claim.reset()

    def _run(self, function: Callable[..., Any], example: Example) -> _Result:
        arguments = inputs.clone(example)
        torch.manual_seed(self._seed)  # a graph takes its random numbers from torch's generator, as eager does
        with torch.no_grad():
            try:
                result = function(*arguments.args, **arguments.kwargs)
            except Exception as error:
                if function is self._runner:
                    raise raises(error) from error
                raise
            leaves = tuple(pytree.flatten(result)[0])
            copies = tuple(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
            torch.cuda.synchronize()
            for tensor in inputs.named_tensors(arguments).values():  # whoever reads it later reads NaN
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        return _Result(leaves=leaves, copies=copies)

    def _poison(self) -> None:
        poison_free_blocks()
        if self._claim.outputs != "borrowed" or not self._held:
            return
        ranges = pool_ranges()
        for leaf in self._held[-1][1].leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and is_inside(leaf.data_ptr(), ranges):
                with torch.inference_mode(leaf.is_inference()), torch.no_grad():
                    leaf.detach().fill_(float("nan"))

    def _look_at_held(self, label: str) -> None:
        if self._claim.outputs != "kept":
            return
        for earlier, result in self._held:
            for leaf, copy in zip(result.leaves, result.copies, strict=True):
                if isinstance(leaf, torch.Tensor) and not pytree.same_bits(leaf.detach(), copy):
                    raise overwritten_output(earlier, label)

    def _compare(self, label: str, expected: _Result, replayed: _Result) -> None:
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
            moves = [self._is_moved(function, example, other) for function in (self._claim.eager, self._runner)]
            if moves == [True, False]:
                return name
        return ""

    def _is_moved(self, function: Callable[..., Any], one: Example, other: Example) -> bool:
        first, second = (self._sequence(function, [example])[0] for example in (one, other))
        pairs = zip(first.copies, second.copies, strict=True)
        return any(isinstance(a, torch.Tensor) and not pytree.same_bits(a, b) for a, b in pairs)


def prove(claim: Claim, make: Callable[[], Callable[..., Any]], watch: GraphWatch) -> tuple[Trouble | None, int]:
    """Make the runner under the watch, prove it, and return the first trouble, or None, with the number of trials."""
    trials = 0
    try:
        try:
            runner = make()
        except Exception as error:
            raise raises(error) from error
        proof = Proof(claim, runner, watch)
        try:
            with torch.random.fork_rng():
                proof.run()
        finally:
            trials = proof.trials
    except Trouble as trouble:
        return trouble, trials
    return None, trials

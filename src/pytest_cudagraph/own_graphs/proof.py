"""Prove that a runner which captures its own graphs computes what eager computes.

The runner is opaque: only its calls are seen, and what the watch tells of its graphs. The first trouble ends the proof,
because it often causes the next ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.check.weight_change import changed
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.own_graphs.memory import reserved_bytes
from pytest_cudagraph.own_graphs.trial import CallOutput, Claim, Trials
from pytest_cudagraph.own_graphs.trouble import (
    Trouble,
    baked_scalar,
    eager_fallback,
    memory_growth,
    no_graph,
    raises,
    recaptures,
    stale_weights,
)
from pytest_cudagraph.own_graphs.watch import GraphWatch

_ROUNDS = 2
_STEPS = 16


class Proof:
    """One proof. ``run`` goes through the phases and raises the first :class:`Trouble`."""

    def __init__(self, claim: Claim, runner: Callable[..., Any], watch: GraphWatch) -> None:
        self._claim, self._watch = claim, watch
        self._trials = Trials(claim, runner, watch)

    @property
    def calls(self) -> int:
        """Calls of the runner that were compared with eager."""
        return self._trials.count

    @property
    def _sizes(self) -> list[int]:
        return sorted(self._claim.examples)

    def run(self) -> None:
        """All phases. Raises :class:`~pytest_cudagraph.own_graphs.trouble.Trouble` for the first that fails."""
        for size in self._sizes:  # here the runner may capture
            for _ in range(2):
                self._trials.attempt(f"batch {size}", self._trials.fresh(size))
        if not self._watch.captures:
            raise no_graph(self._watch)
        self._steady()
        self._in_a_row()
        self._with_other_weights()
        self._after_between()
        self._on_a_stream()
        self._in_threads()

    def _steady(self) -> None:
        """From here on every size was called before: no capture, no eager call, no more memory."""
        first_call, captures, before_bytes = len(self._watch.calls), len(self._watch.graphs), reserved_bytes()
        for label, example in self._steady_calls():
            self._trials.attempt(label, example)
        self._trials.held.clear()
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
                yield f"batch {size}", self._trials.fresh(size)
        largest = self._sizes[-1]
        for like in ("zeros", "large", "permuted"):
            yield f"batch {largest}, {like} values", self._trials.fresh(largest, like=like)
        for size in self._sizes[:-1]:  # what the largest call leaves in the buffers must reach no smaller one
            self._call_with_nan(largest)
            yield f"batch {size} after a batch {largest} of NaN", self._trials.fresh(size)

    def _call_with_nan(self, size: int) -> None:
        example = self._trials.fresh(size)
        for tensor in inputs.named_tensors(example).values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self._trials.restart()
        self._trials.call(self._trials.runner, example)

    def _in_a_row(self) -> None:
        """Several calls from one state: what a call leaves, the next ones read."""
        steps = self._claim.steps
        if steps is None:
            steps = _STEPS if self._writes_state() else 0
        order = random.Random(1)
        examples = [self._trials.fresh(order.choice(self._sizes)) for _ in range(steps)]
        expected = self._trials.sequence(self._claim.eager, examples)
        replayed = self._trials.sequence(self._trials.runner, examples)
        for number, (one, other) in enumerate(zip(expected, replayed, strict=True), 1):
            self._trials.compare_results(f"call {number} of {len(examples)} in a row", one, other)

    def _writes_state(self) -> bool:
        self._trials.restart()
        before = {name: value.clone() for name, value in self._trials.state.live().items()}
        self._trials.call(self._claim.eager, self._trials.fresh(self._sizes[-1]))
        now = self._trials.state.live()
        return any(name not in now or not pytree.same_bits(value, now[name]) for name, value in before.items())

    def _with_other_weights(self) -> None:
        """A graph reads weights where they lie, so a change in place must reach it."""
        weights = [each for each in self._trials.state.live().values() if isinstance(each, torch.nn.Parameter)]
        if not weights:
            return
        saved = self._trials.state
        with torch.no_grad(), changed(weights):
            self._trials.state = state.Snapshot.take(self._claim.eager)
            try:
                self._try_ends("weights changed in place", stale_weights)
            finally:
                self._trials.state = saved

    def _after_between(self) -> None:
        if self._claim.between is None:
            return
        before = {name: value.clone() for name, value in self._trials.state.live().items()}
        addresses = {name: value.data_ptr() for name, value in self._trials.state.live().items()}
        self._claim.between()
        self._trials.state = state.Snapshot.take(self._claim.eager)
        now = self._trials.state.live()
        moved = any(
            name not in before or value.data_ptr() != addresses[name] or not pytree.same_bits(value, before[name])
            for name, value in now.items()
        )
        self._try_ends("after between()", stale_weights if moved else baked_scalar)

    def _try_ends(self, label: str, cause: Callable[[str, Trouble], Trouble]) -> None:
        """The smallest and the largest size. A difference here has a known cause."""
        for size in dict.fromkeys((self._sizes[0], self._sizes[-1])):
            try:
                self._trials.attempt(f"batch {size}, {label}", self._trials.fresh(size))
            except Trouble as trouble:
                if trouble.finding.id != "wrong":
                    raise
                raise cause(label, trouble) from None

    def _on_a_stream(self) -> None:
        if not self._claim.streams:
            return
        for size in self._sizes:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                self._trials.attempt(f"batch {size} on a stream of the caller", self._trials.fresh(size))

    def _in_threads(self) -> None:
        count = self._claim.threads
        if count < 2:
            return
        examples = [[self._trials.fresh(size) for size in self._sizes] for _ in range(count)]
        expected = [[self._trials.call(self._claim.eager, example) for example in batch] for batch in examples]
        failures: list[BaseException] = []

        def serve(batch: list[Example], wanted: list[CallOutput]) -> None:
            try:
                for example, result in zip(batch, wanted, strict=True):
                    self._trials.compare_results(
                        f"one of {count} threads", result, self._trials.call(self._trials.runner, example)
                    )
            except BaseException as error:  # told by the thread that waits
                failures.append(error)

        threads = [threading.Thread(target=serve, args=pair) for pair in zip(examples, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


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
            trials = proof.calls
    except Trouble as trouble:
        return trouble, trials
    return None, trials

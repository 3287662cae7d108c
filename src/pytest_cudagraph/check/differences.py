"""Two results of a call side by side: where they differ, by how much, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.check.compare import Tolerance, compare, furthest, rounding_limit, spread
from pytest_cudagraph.check.initial_state import CallResult, is_object
from pytest_cudagraph.pytree import same_bits
from pytest_cudagraph.values import Disagreement

Pair = tuple[str, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultComparison:
    """Compares results of one batch size: outputs first, then state."""

    batch_size: int
    before: Mapping[str, torch.Tensor]
    """The state from which every call starts."""
    tolerance: Tolerance
    unread: frozenset[str] = frozenset()
    """State that each call replaces before it reads it. It is not compared."""

    def first_difference(
        self, eager: CallResult, replay: CallResult, noise: Mapping[str, float]
    ) -> Disagreement | None:
        """Where replay first differs from eager: structure, outputs, state. ``noise``: see :meth:`noise_of`."""
        if eager.structure != replay.structure:
            evidence = (f"eager returns {_places(eager)}", f"replay returns {_places(replay)}")
            return self.disagreement("output", "replay returns another structure than eager", evidence)
        outputs = (self._output_difference(pair, noise) for pair in _output_pairs(eager, replay))
        states = (self._state_difference(pair, noise, eager, replay) for pair in self._state_pairs(eager, replay))
        return next((found for found in itertools.chain(outputs, states) if found is not None), None)

    def unrepeatable(self, eager: CallResult, again: CallResult) -> Disagreement | None:
        """Where two eager runs differ by more than rounding. Replay cannot be compared with such a model."""
        if eager.structure != again.structure:
            return self._two_results("output", _places(eager), _places(again))
        for where, first, second in self._pairs(eager, again):
            if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
                if not _equal_values(first, second):
                    return self._two_results(where, _words(first), _words(second))
            elif spread(first, second) > rounding_limit(first, self.tolerance):
                return self._two_results(where, *furthest(first, second))
        return None

    def noise_of(self, eager: CallResult, again: CallResult) -> dict[str, float]:
        """The largest difference between two eager runs, for each output and state where it is not 0."""
        gaps = ((where, spread(first, second)) for where, first, second in self._tensor_pairs(eager, again))
        return {where: gap for where, gap in gaps if 0.0 < gap < math.inf}

    def is_bit_exact(self, first: CallResult, second: CallResult) -> bool:
        """Whether two results of one structure hold the same bits in every tensor."""
        return all(same_bits(one, other) for _, one, other in self._tensor_pairs(first, second))

    def disagreement(
        self, where: str, message: str, evidence: tuple[str, ...] = (), finding_id: str | None = None
    ) -> Disagreement:
        """A disagreement at this batch size."""
        return Disagreement(
            batch_size=self.batch_size, where=where, message=message, evidence=evidence, finding_id=finding_id
        )

    def other_generators(self, eager: CallResult, replay: CallResult) -> Disagreement:
        """The random generators differ after the two calls."""
        drew = {True: "draws random numbers", False: "draws none"}
        evidence = (f"eager {drew[eager.random]}, replay {drew[replay.random]}",)
        message = "their state after a replay differs from their state after eager"
        return self.disagreement("the random generators", message, evidence, "rng")

    def written(self, names: tuple[str, ...]) -> Disagreement:
        """Parameters changed that eager, on the example, does not write. There is no copy of them."""
        message = "a replay writes to it, or eager on new inputs. Eager on the example does not"
        evidence = (f"changed: {', '.join(names)}", "the old values are lost, because no copy was made")
        return self.disagreement(names[0], message, evidence)

    def _tensor_difference(self, pair: Pair, noise: Mapping[str, float]) -> Disagreement | None:
        where, expected, found = pair
        words = compare(expected, found, self.tolerance, noise.get(where, 0.0))
        return None if words is None else self.disagreement(where, *words)

    def _output_difference(self, pair: Pair, noise: Mapping[str, float]) -> Disagreement | None:
        where, expected, found = pair
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            return self._tensor_difference(pair, noise)
        if _equal_values(expected, found):
            return None
        message = f"replay returns {_words(found)}, eager {_words(expected)}"
        if any(isinstance(leaf, torch.Tensor) or is_object(leaf) for leaf in (expected, found)):
            return self.disagreement(where, message)
        fix = "capture fixes a plain Python value. Return a tensor instead"
        return self.disagreement(where, message, (fix,), "baked-scalar")

    def _state_difference(
        self, pair: Pair, noise: Mapping[str, float], eager: CallResult, replay: CallResult
    ) -> Disagreement | None:
        where, expected, found = pair
        if expected is not None and found is not None:
            difference = self._tensor_difference(pair, noise)
        elif expected is found:
            difference = None
        else:
            has, lacks = ("eager", "replay") if found is None else ("replay", "eager")
            difference = self.disagreement(where, f"there after {has}, not there after {lacks}")
        if difference is None:
            return None
        if where in eager.rebound:
            # A replay runs no Python. So it cannot assign a tensor, neither in place of another one nor a new one.
            return replace(
                difference,
                message="eager puts a new tensor there, replay writes only to the tensor of capture",
                evidence=(difference.message, *difference.evidence),
                finding_id="rebinds-state",
            )
        did = {True: "changes it", False: "does not change it"}
        acts = f"eager {did[where in eager.state]}, replay {did[where in replay.state]}"
        return replace(difference, evidence=(*difference.evidence, acts))

    def _two_results(self, where: str, first: str, second: str) -> Disagreement:
        return self.disagreement(
            where,
            "two eager runs from the same state, inputs and seed differ, so replay cannot be compared with eager",
            (
                f"eager gives {first}, then {second}",
                "it depends on a counter, a clock or a generator of its own. A graph keeps the value from its capture",
            ),
        )

    def _pairs(self, first: CallResult, second: CallResult) -> Iterator[Pair]:
        return itertools.chain(_output_pairs(first, second), self._state_pairs(first, second))

    def _tensor_pairs(self, first: CallResult, second: CallResult) -> Iterator[Pair]:
        for where, one, other in self._pairs(first, second):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                yield where, one, other

    def _state_pairs(self, first: CallResult, second: CallResult) -> Iterator[Pair]:
        # State that neither call changed equals the start in both.
        for name in sorted({*first.state, *second.state} - self.unread):
            start = self.before.get(name)
            yield name, first.state.get(name, start), second.state.get(name, start)


def has_same_results(first: CallResult, second: CallResult) -> bool:
    """Whether two results have the same outputs and changed the same state alike, bit by bit."""
    states = [(tensor, second.state.get(name)) for name, tensor in first.state.items()]
    is_alike = all(a is b if a is None or b is None else same_bits(a, b) for a, b in states)
    return is_alike and first.state.keys() == second.state.keys() and has_same_outputs(first, second)


def has_same_outputs(first: CallResult, second: CallResult) -> bool:
    """Whether two results have the same outputs bit by bit. State is not compared."""
    if first.structure != second.structure:
        return False
    pairs = _output_pairs(first, second)
    return all(same_bits(a, b) for _, a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _output_pairs(first: CallResult, second: CallResult) -> Iterator[Pair]:
    for where, leaf in first.outputs.items():
        yield where, leaf, second.outputs[where]


def _equal_values(first: Any, second: Any) -> bool:
    if pytree.is_array(first) and pytree.is_array(second):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return bool(((first == second) | ((first != first) & (second != second))).all())
    if is_object(first) and is_object(second):
        return True
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _places(result: CallResult) -> str:
    return ", ".join(result.outputs) or "nothing"


def _words(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}"
    return f"an object of {type(leaf).__name__}" if is_object(leaf) else repr(leaf)


_OTHER_RANDOM_NUMBERS = (
    "eager draws random numbers here, and compiled code draws others from the same seed "
    "(torch._inductor.config.fallback_random makes them equal)"
)


def with_cause(disagreement: Disagreement, message: str) -> Disagreement:
    """Replace the message by its cause, and keep the old message as evidence."""
    return replace(disagreement, message=message, evidence=(disagreement.message, *disagreement.evidence))


def explained(
    disagreement: Disagreement,
    eager: CallResult,
    replay: CallResult,
    *,
    poison: Callable[[], None],
    suspects: Iterable[tuple[str, CallResult]],
) -> Disagreement:
    """Name the cause if one explains the whole output: nothing was written, or another call's result was returned.

    ``poison`` fills the graph's output buffers. ``suspects`` are other eager results with the cause each would prove.
    """
    where = disagreement.where
    expected, found = eager.outputs.get(where), replay.outputs.get(where)
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor) or not found.numel():
        return disagreement
    if _is_poison(found, replay.held[where], poison):
        return with_cause(disagreement, "replay did not write this output: it still holds what it was poisoned with")
    for cause, other in suspects:
        if _explains(other.outputs.get(where), expected, found):
            return with_cause(disagreement, cause)
    return disagreement


def with_circumstances(
    disagreement: Disagreement, eager: CallResult, *, moved: tuple[str, ...], is_opaque: bool
) -> Disagreement:
    """Add what this batch size shows besides: rebound state, Python values, moved tensors, other random numbers.

    ``is_opaque``: the graph holds compiled code.
    """
    evidence, finding_id = list(disagreement.evidence), disagreement.finding_id
    if eager.rebound and not finding_id:
        rebound = ", ".join(sorted(eager.rebound))
        evidence.append(f"eager puts a new tensor there, replay keeps the old one: {rebound}")
        finding_id = "rebinds-state"
    if eager.python:
        evidence.append(f"eager changes Python values, which replay never sees: {', '.join(eager.python)}")
        finding_id = finding_id or "stateful-python"
    if moved:
        evidence.append(moved_text(moved))
        finding_id = finding_id or "rebinds-state"
    if eager.random and is_opaque:
        evidence.append(_OTHER_RANDOM_NUMBERS)
    return replace(disagreement, evidence=tuple(evidence), finding_id=finding_id, assigned=eager.assigned)


def moved_text(moved: tuple[str, ...]) -> str:
    """The evidence that state has another address than at capture."""
    return f"moved since capture, replay still reads the old address: {', '.join(moved)}"


def _explains(other: object, expected: torch.Tensor, found: torch.Tensor) -> bool:
    if not isinstance(other, torch.Tensor):
        return False
    return compare(other, found, Tolerance()) is None and compare(expected, other, Tolerance()) is not None


def _is_poison(found: torch.Tensor, held: torch.Tensor, poison: Callable[[], None]) -> bool:
    """Whether replay left its buffer as :meth:`CapturedGraph.poison` fills it: one value everywhere, NaN for floats."""
    if found.dtype is torch.bool or found.layout is not torch.strided or found.is_quantized:
        return False
    first = found.reshape(-1)[:1]
    is_inexact = found.dtype.is_floating_point or found.dtype.is_complex
    # A single integer, or a constant result, may equal the sentinel by chance.
    if not (bool(first.isnan().any()) if is_inexact else found.numel() > 1):
        return False
    poison()
    return same_bits(found, first.expand(found.numel()).reshape(found.shape)) and same_bits(found, held)

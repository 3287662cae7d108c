"""Two results of a call side by side: is eager the same twice, is replay the same as eager, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_cudagraph.check.compare import (
    TensorDifference,
    Tolerance,
    compare,
    furthest,
    has_nan,
    rounding_limit,
    spread,
)
from pytest_cudagraph.check.initial_state import CallResult
from pytest_cudagraph.inputs.example import is_opaque
from pytest_cudagraph.pytree import same_bits

Tensors = Mapping[str, torch.Tensor]
Pair = tuple[str, Any, Any]


def first_difference(
    eager: CallResult, replay: CallResult, before: Tensors, tolerance: Tolerance, noise: Mapping[str, float]
) -> TensorDifference | None:
    """Where replay first differs from eager: structure, outputs, then state. ``before`` is the state of the start."""
    if eager.structure != replay.structure:
        return TensorDifference(
            where="output",
            message="replay returns another structure than eager",
            evidence=(f"eager returns {_places(eager)}", f"replay returns {_places(replay)}"),
        )
    outputs = (_output_difference(pair, tolerance, noise) for pair in _output_pairs(eager, replay))
    states = (_state_difference(pair, tolerance, noise, eager, replay) for pair in _state_pairs(eager, replay, before))
    return next((found for differences in (outputs, states) for found in differences if found is not None), None)


def unrepeatable(
    eager: CallResult, again: CallResult, before: Tensors, tolerance: Tolerance
) -> TensorDifference | None:
    """Where two runs of eager differ by more than rounding, so that there is nothing to hold replay against."""
    if eager.structure != again.structure:
        return _two_answers("output", _places(eager), _places(again))
    for where, first, second in (*_output_pairs(eager, again), *_state_pairs(eager, again, before)):
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            if not _equal_values(first, second):
                return _two_answers(where, _words(first), _words(second))
        elif spread(first, second) > rounding_limit(first, tolerance):
            return _two_answers(where, *furthest(first, second))
    return None


def noise_of(eager: CallResult, again: CallResult, before: Tensors) -> dict[str, float]:
    """How far two runs of eager lie apart, for every output and state where it is not 0."""
    pairs = (*_output_pairs(eager, again), *_state_pairs(eager, again, before))
    tensors = ((where, a, b) for where, a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))
    gaps = ((where, spread(first, second)) for where, first, second in tensors)
    return {where: gap for where, gap in gaps if 0.0 < gap < math.inf}


def is_bit_exact(first: CallResult, second: CallResult, before: Tensors) -> bool:
    """Whether two answers of one structure hold the same bits in every tensor."""
    pairs = (*_output_pairs(first, second), *_state_pairs(first, second, before))
    return all(same_bits(a, b) for _, a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def has_same_outputs(first: CallResult, second: CallResult) -> bool:
    """Whether two answers give the same outputs to the last bit, whatever they did to the state."""
    return first.structure == second.structure and is_bit_exact(
        replace(first, state={}), replace(second, state={}), before={}
    )


def count_tensors(answer: CallResult) -> int:
    """How many outputs are tensors."""
    return sum(isinstance(leaf, torch.Tensor) for leaf in answer.outputs.values())


def nan_places(answer: CallResult) -> list[str]:
    """The outputs that hold NaN."""
    return [where for where, leaf in answer.outputs.items() if isinstance(leaf, torch.Tensor) and has_nan(leaf)]


def opaque_places(answer: CallResult) -> list[str]:
    """The outputs that are objects, with their class: ``output['cache'] (StaticCache)``."""
    return [f"{where} ({type(leaf).__name__})" for where, leaf in answer.outputs.items() if is_opaque(leaf)]


def _output_difference(pair: Pair, tolerance: Tolerance, noise: Mapping[str, float]) -> TensorDifference | None:
    where, eager, replay = pair
    if isinstance(eager, torch.Tensor) and isinstance(replay, torch.Tensor):
        return compare(where, eager, replay, tolerance, noise.get(where, 0.0))
    if _equal_values(eager, replay):
        return None
    difference = TensorDifference(where=where, message=f"replay returns {_words(replay)}, eager {_words(eager)}")
    if any(isinstance(leaf, torch.Tensor) or is_opaque(leaf) for leaf in (eager, replay)):
        return difference
    fixed = "a plain Python value is fixed at capture; return a tensor"
    return replace(difference, evidence=(fixed,), finding_id="baked-scalar")


def _state_difference(
    pair: Pair, tolerance: Tolerance, noise: Mapping[str, float], eager: CallResult, replay: CallResult
) -> TensorDifference | None:
    where, expected, found = pair
    difference = (
        compare(where, expected, found, tolerance, noise.get(where, 0.0))
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)
        else _presence(where, expected, found)
    )
    if difference is None:
        return None
    if where in eager.rebound:
        # A replay runs no Python, so it never assigns: neither a tensor in the place of another, nor a new one.
        return replace(
            difference,
            message="eager puts a new tensor there; replay writes only where it was captured to write",
            evidence=(difference.message, *difference.evidence),
            finding_id="rebinds-state",
        )
    did = {True: "changes it", False: "leaves it as it was"}
    acts = f"eager {did[where in eager.state]}, replay {did[where in replay.state]}"
    return replace(difference, evidence=(*difference.evidence, acts))


def _presence(where: str, expected: Any, found: Any) -> TensorDifference | None:
    if (expected is None) == (found is None):
        return None
    has, lacks = ("eager", "replay") if found is None else ("replay", "eager")
    return TensorDifference(where=where, message=f"there after {has}, not there after {lacks}")


def _two_answers(where: str, first: str, second: str) -> TensorDifference:
    return TensorDifference(
        where=where,
        message="eager gives two answers from the same state, inputs and seed, so replay cannot be held against it",
        evidence=(
            f"eager gives {first}, then {second}",
            "a counter, a clock or a generator of its own feeds it; a graph keeps the value of capture time",
        ),
    )


def _output_pairs(first: CallResult, second: CallResult) -> Iterator[Pair]:
    for where, leaf in first.outputs.items():
        yield where, leaf, second.outputs[where]


def _state_pairs(first: CallResult, second: CallResult, before: Tensors) -> Iterator[Pair]:
    # What neither changed is equal to the start, and so to each other.
    for name in sorted({*first.state, *second.state}):
        yield name, first.state.get(name, before.get(name)), second.state.get(name, before.get(name))


def _equal_values(first: Any, second: Any) -> bool:
    if is_opaque(first) and is_opaque(second):
        return True
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _places(answer: CallResult) -> str:
    return ", ".join(answer.outputs) or "nothing"


def _words(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}"
    return f"an object of {type(leaf).__name__}" if is_opaque(leaf) else repr(leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Another question that replay may have answered: eager's answer to it, and what it means if replay agrees."""

    message: str
    answer: Callable[[], CallResult]


def explain(
    difference: TensorDifference,
    eager: CallResult,
    replay: CallResult,
    poison: Callable[[], None],
    suspects: Iterator[Suspect],
) -> TensorDifference:
    """The difference with its cause in the first place, if there is one that explains the whole output.

    ``poison`` fills the buffers that ``replay.held`` lies in.
    """
    where = difference.where
    expected, found = eager.outputs.get(where), replay.outputs.get(where)
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor) or not found.numel():
        return difference
    if _is_poison(found, replay.held[where], poison):
        return with_cause(difference, "replay did not write this output: it still holds what it was poisoned with")
    for suspect in suspects:
        other = suspect.answer().outputs.get(where)
        if _explains(other, expected, found):
            return with_cause(difference, suspect.message)
    return difference


def _explains(other: object, expected: torch.Tensor, found: torch.Tensor) -> bool:
    if not isinstance(other, torch.Tensor):
        return False
    default = Tolerance()
    return compare("", other, found, default) is None and compare("", expected, other, default) is not None


def _is_poison(found: torch.Tensor, held: torch.Tensor, poison: Callable[[], None]) -> bool:
    """Whether replay left its buffer as :meth:`CapturedGraph.poison` fills it: one value everywhere, NaN for floats."""
    if found.dtype is torch.bool or found.layout is not torch.strided or found.is_quantized:
        return False
    first = found.reshape(-1)[:1]
    is_nan = bool(first.isnan().any())
    # Among whole numbers a single one, or a constant answer, may look like the sentinel by chance.
    if not (is_nan if found.dtype.is_floating_point or found.dtype.is_complex else found.numel() > 1):
        return False
    poison()
    return same_bits(found, first.expand(found.numel()).reshape(found.shape)) and same_bits(found, held)


def with_cause(difference: TensorDifference, message: str) -> TensorDifference:
    """The difference under its cause; what it was told as becomes evidence."""
    return replace(difference, message=message, evidence=(difference.message, *difference.evidence))

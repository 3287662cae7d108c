"""Name the likely cause of a disagreement, in its message and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from pytest_cudagraph.check.compare import Tolerance, compare
from pytest_cudagraph.check.initial_state import CallResult
from pytest_cudagraph.pytree import same_bits
from pytest_cudagraph.values import Disagreement

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
        evidence.append(f"moved since capture, replay still reads the old address: {', '.join(moved)}")
        finding_id = finding_id or "rebinds-state"
    if eager.random and is_opaque:
        evidence.append(_OTHER_RANDOM_NUMBERS)
    return replace(disagreement, evidence=tuple(evidence), finding_id=finding_id, assigned=eager.assigned)


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

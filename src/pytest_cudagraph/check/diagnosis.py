"""Why a replay differs, as far as it can be told for sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from pytest_cudagraph.check.compare import Difference, Tolerance, compare
from pytest_cudagraph.check.start import Answer
from pytest_cudagraph.leaves import same_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Another question that replay may have answered: eager's answer to it, and what it means if replay agrees."""

    message: str
    answer: Callable[[], Answer]


def explain(
    difference: Difference, eager: Answer, replay: Answer, poison: Callable[[], None], suspects: Iterator[Suspect]
) -> Difference:
    """The difference with its cause in the first place, if there is one that explains the whole output.

    ``poison`` fills the buffers that ``replay.held`` lies in.
    """
    where = difference.where
    expected, found = eager.outputs.get(where), replay.outputs.get(where)
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor) or not found.numel():
        return difference
    if _is_poison(found, replay.held[where], poison):
        return because(difference, "replay did not write this output: it still holds what it was poisoned with")
    for suspect in suspects:
        other = suspect.answer().outputs.get(where)
        if _explains(other, expected, found):
            return because(difference, suspect.message)
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


def because(difference: Difference, message: str) -> Difference:
    """The difference under its cause; what it was told as becomes evidence."""
    return replace(difference, message=message, evidence=(difference.message, *difference.evidence))

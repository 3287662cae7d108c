"""Logits of two calls with the same tokens: how far they may differ, and whether they are numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.results import NotFiniteLogits

_BFLOAT16_RTOL = 0.016
"""That of ``torch.testing.assert_close``."""


class LogitsDifference(NamedTuple):
    """Where two logits (rows, count, vocabulary) differ, by place (rows, count)."""

    allowed: torch.Tensor
    beyond: torch.Tensor
    """Where they differ by more, or one of them is not a number."""
    largest: float
    """The difference that exceeds what is allowed by most, or comes closest to it."""
    tolerance: float
    """What is allowed there."""


def logits_difference(expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance) -> LogitsDifference:
    """Compare logits that other shapes may have rounded.

    At each place they may differ by ``atol + rtol * size`` of :func:`_tolerance_of_model` and :func:`_sizes`: a small
    logit is a sum of terms as large as those of a large one.
    """
    (rtol, atol), expected = _tolerance_of_model(expected.dtype, tolerance), wide(expected)
    differences = absolute_differences(expected, wide(found)).amax(-1)
    allowed = atol + rtol * _sizes(expected)
    worst = int((differences - allowed).nan_to_num(nan=torch.inf).argmax())
    largest, there = float(differences.flatten()[worst]), float(allowed.flatten()[worst])
    return LogitsDifference(allowed, ~(differences <= allowed), largest, there)


def not_finite_logits(logits: torch.Tensor | None) -> NotFiniteLogits | None:
    """The first place in time of logits (rows, count, vocabulary) that is no choice. -inf rules a token out."""
    assert logits is not None
    largest = logits.amax(-1)
    places = (~largest.isfinite()).T.nonzero()
    if not len(places):
        return None
    position, row = (int(index) for index in places[0])
    return NotFiniteLogits(row=row, position=position, largest=float(largest[row, position]))


def _tolerance_of_model(dtype: torch.dtype, tolerance: Tolerance) -> tuple[float, float]:
    """``(rtol, atol)`` for the logits of a whole model in other shapes.

    The defaults of ``assert_close`` are for one operation, and each layer adds its own rounding. So the relative part
    is at least half of the dtype's digits, ``sqrt(eps)``, and at most that of bfloat16, which has few digits.
    """
    rtol, atol = tolerance.of(dtype)
    if tolerance.rtol is None:
        rtol = max(rtol, min(math.sqrt(torch.finfo(dtype).eps), _BFLOAT16_RTOL))
    return rtol, atol


def absolute_differences(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Element by element. An infinity does not differ from itself: models rule tokens out by it."""
    return torch.where(expected == found, 0.0, (found - expected).abs())


def _sizes(logits: torch.Tensor) -> torch.Tensor:
    """The size of the logits of each place: the largest or the median, whichever is farther from 0.

    Not the smallest: a logit of ``finfo.min`` or -1e9 rules a token out, and would allow every difference.
    """
    largest, median = logits.amax(-1).abs(), logits.median(-1).values.abs()
    return torch.maximum(*(each.masked_fill(each.isinf(), 0.0) for each in (largest, median)))


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()

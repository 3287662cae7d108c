"""Do rows depend on the rows beside them? Then padding changes answers, and a runner must not pad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.runner.rows import Cut

Call = Callable[[Example], Any]
"""Runs the model from one and the same state and random state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Examples whose first rows are the same: ``rows`` of them, one less, and ``kept`` of them beside other rows."""

    whole: Example
    shorter: Example
    mixed: Example
    rows: int
    kept: int


def why_dependent(call: Call, careful: Call, examples: Rows, cut: Cut, *, is_random: bool) -> str:
    """Why rows may not be padded; empty where nothing speaks against it, or where the model takes no other rows.

    ``careful`` is the call for rows that were made up, and raises for what the model does not take.

    The same shapes with other rows beside them must give the same answer, up to what the model does not repeat by
    itself; one row less the same up to half of the dtype's digits, since other shapes are summed in another order.
    A model that draws random numbers is only tried with the same shapes, where it draws the same ones.
    """
    whole, again = call(examples.whole), call(examples.whole)
    if not is_random:
        fewer = examples.rows - 1
        where = _first_gap(cut(whole, fewer), cut(call(examples.shorter), fewer), None, _half_of_the_digits)
        if where is not None:
            return f"output{where} depends on the number of rows"
    mixed = _taken(careful, examples.mixed)
    if mixed is None:
        return ""
    first, noisy, other = (cut(output, examples.kept) for output in (whole, again, mixed))
    where = _first_gap(first, other, noisy, _last_digit)
    return "" if where is None else f"output{where} depends on the other rows"


def why_state_differs(
    written: Callable[[Example], Mapping[str, torch.Tensor]], trials: Iterable[tuple[Example, Example]]
) -> str:
    """Why rows may not be padded for what a call leaves in the model's state; empty where nothing speaks against it.

    ``trials`` are rows, and the same ones padded; the first that the model takes is the one that counts. A pad row
    repeats the last one: what writes it to the same place leaves the same there; what counts it, adds it up or gives it
    a place of its own does not. Up to half of the dtype's digits, as for outputs.
    """
    for rows, padded in trials:
        alone = _taken(written, rows)
        among = alone and _taken(written, padded)
        if alone is None or among is None:
            continue
        for name in {**alone, **among}:
            one, other = alone.get(name), among.get(name)
            if one is None or other is None or _gap(one, other) > _half_of_the_digits(one):
                return f"a pad row would change what a call writes to {name}"
        return ""
    return ""


def _taken(call: Call, example: Example) -> Any:
    try:
        return call(example)
    # Whatever it raises: these values were made up, and nobody promised that the model takes them.
    except Exception:
        return None


def _first_gap(one: Any, other: Any, again: Any, allowed: Callable[[torch.Tensor], float]) -> str | None:
    """The path of the first output that differs by more than is allowed, and than the model differs from itself."""
    values, _ = leaves.flatten(other)
    noisy = [None] * len(values) if again is None else leaves.flatten(again)[0]
    for (path, value), found, repeated in zip(leaves.named_leaves(one), values, noisy, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        noise = 0.0 if repeated is None else _gap(value, repeated)
        if math.isfinite(noise) and _gap(value, found) > allowed(value) + 2 * noise:
            return path
    return None


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; NaN equals NaN, and whole numbers that differ lie 1 apart at least."""
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    gaps = torch.where((first == second) | (first.isnan() & second.isnan()), 0.0, (first - second).abs())
    return float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _last_digit(tensor: torch.Tensor) -> float:
    return _largest(tensor) * torch.finfo(tensor.dtype).eps if _is_inexact(tensor) else 0.0


def _half_of_the_digits(tensor: torch.Tensor) -> float:
    return _largest(tensor) * math.sqrt(torch.finfo(tensor.dtype).eps) if _is_inexact(tensor) else 0.0


def _largest(tensor: torch.Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    magnitudes = tensor.to(wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(magnitudes.max()) if tensor.numel() else 0.0


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

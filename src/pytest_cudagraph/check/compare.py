"""Two tensors, in the words of the check: the same bits, close enough, or different, where and by how much."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import torch

from pytest_cudagraph.pytree import kind_of, same_bits

# The table of torch.testing.assert_close, (rtol, atol); every other dtype is compared exactly.
_DTYPE_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What ``assert_close`` may forgive; None stands for the default of the dtype.

    Whole numbers and booleans are compared exactly, whatever is given: a token id is not close to another one.
    """

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """``(rtol, atol)`` for values of ``dtype``."""
        if not _is_inexact(dtype):
            return 0.0, 0.0
        rtol, atol = _DTYPE_TOLERANCES.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One place where two answers differ."""

    where: str
    message: str
    evidence: tuple[str, ...] = ()
    finding_id: str | None = None
    assigned: tuple[str, ...] = ()
    """State and Python values that eager assigns, by name."""


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN; never for whole numbers and booleans."""
    return _is_inexact(tensor.dtype) and bool(torch.isnan(_dense(tensor)).any())


def spread(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference of two tensors; infinite where no number can tell (shape, NaN, infinities)."""
    if same_bits(first, second):
        return 0.0
    if kind_of(first) != kind_of(second) or first.shape != second.shape:
        return math.inf
    largest = float(_gaps(_dense(first), _dense(second)).max())
    # Beyond 2**53 two whole numbers may lie closer together than double precision can tell.
    return largest if _is_inexact(first.dtype) else max(largest, 1.0)


def rounding_limit(tensor: torch.Tensor, tolerance: Tolerance) -> float:
    """The largest difference between two runs of eager that rounding may explain.

    Sums taken in another order differ in the last digits; half of the dtype's digits (the square root of its
    epsilon, of the largest magnitude) is where another cause begins. Whole numbers have no such digits: 0.
    """
    if not _is_inexact(tensor.dtype) or not tensor.numel():
        return 0.0
    magnitudes = torch.nan_to_num(_dense(tensor).abs(), nan=0.0, posinf=0.0)
    rtol, atol = tolerance.of(tensor.dtype)
    return atol + max(rtol, math.sqrt(torch.finfo(tensor.dtype).eps)) * float(magnitudes.max())


def compare(
    where: str,
    eager: torch.Tensor,
    replay: torch.Tensor,
    tolerance: Tolerance,
    noise: float = 0.0,
) -> TensorDifference | None:
    """Judge ``replay`` by ``torch.testing.assert_close``; ``noise`` is how far eager differs from itself.

    NaN equals NaN. Where eager itself is not repeatable, twice its own difference is allowed on top.
    """
    unlike = _unlike(eager, replay)
    if unlike is not None:
        return TensorDifference(where=where, message=f"replay gives {unlike[1]} where eager gives {unlike[0]}")
    rtol, atol = tolerance.of(eager.dtype)
    atol += 2 * noise
    expected, found = _dense(eager), _dense(replay)
    if _is_close(found, expected, rtol, atol):
        return None
    return _largest_difference(where, expected, found, (rtol, atol))


def _is_close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    # Equal values need no tolerance; and the first assert_close of a process imports torch's distributed tensors,
    # which takes most of a second.
    if torch.equal(found, expected) or same_bits(found, expected):
        return True
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def furthest(first: torch.Tensor, second: torch.Tensor) -> tuple[str, str]:
    """In words: the two values that lie furthest apart, the second with its index; or what else is unlike."""
    unlike = _unlike(first, second)
    if unlike is not None:
        return unlike
    one, other, place = _extremes(_dense(first), _dense(second), _gaps(_dense(first), _dense(second)))
    return _number(one), f"{_number(other)}{place}"


def _largest_difference(
    where: str, eager: torch.Tensor, replay: torch.Tensor, tolerances: tuple[float, float]
) -> TensorDifference:
    wrong = ~torch.isclose(replay, eager, rtol=tolerances[0], atol=tolerances[1], equal_nan=True)
    expected, found, place = _extremes(eager, replay, torch.where(wrong, _gaps(eager, replay), -1.0))
    values = f"eager {_number(expected)}, replay {_number(found)}{place}"
    count = f"differing elements: {int(wrong.sum())} of {eager.numel()}"
    message = _distance(expected, found, place, tolerances)
    if message is None:
        return TensorDifference(where=where, message=values, evidence=(count,))
    return TensorDifference(where=where, message=message, evidence=(values, count))


def _extremes(first: torch.Tensor, second: torch.Tensor, gaps: torch.Tensor) -> tuple[complex, complex, str]:
    """Both values where the gap is largest, and where that is."""
    position = int(gaps.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), gaps.shape)) if gaps.ndim else ()
    values = first.reshape(-1)[position].item(), second.reshape(-1)[position].item()
    return *values, f" at index {index}" if index else ""


def _distance(expected: complex, found: complex, place: str, tolerances: tuple[float, float]) -> str | None:
    """How far off, and how far is allowed; None for NaN, infinities and booleans, which have no distance."""
    if isinstance(expected, bool) or not (cmath.isfinite(expected) and cmath.isfinite(found)):
        return None
    rtol, atol = tolerances
    allowed = f"{_short(atol + rtol * abs(expected))} is allowed (rtol {rtol:.3g}, atol {atol:.3g})"
    distance = _short(abs(found - expected))
    return f"off by {distance}{place}; {allowed if rtol or atol else 'no difference is allowed'}"


def _short(value: float) -> str:
    """Three digits of a distance; all of a whole number."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(value: complex) -> str:
    """Six digits of a real number, whole numbers and booleans as they are."""
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def _gaps(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Absolute differences in double precision; infinite where exactly one side is NaN or another infinity."""
    wide = torch.complex128 if first.dtype.is_complex else torch.float64
    gaps = (first.to(wide) - second.to(wide)).abs()
    gaps = torch.where(gaps.isnan(), math.inf, gaps)
    alike = (first == second) | (first.isnan() & second.isnan()) if _is_inexact(first.dtype) else first == second
    return torch.where(alike, 0.0, gaps)


def _unlike(eager: torch.Tensor, replay: torch.Tensor) -> tuple[str, str] | None:
    """In which property that ``assert_close`` asks for two tensors are of another kind, in words."""
    for noun in ("dtype", "device", "layout"):
        first, second = getattr(eager, noun), getattr(replay, noun)
        if first != second:
            return f"{noun} {first}".replace("torch.", ""), f"{noun} {second}".replace("torch.", "")
    if eager.shape != replay.shape:
        return f"shape {tuple(eager.shape)}", f"shape {tuple(replay.shape)}"
    return None


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values as an ordinary tensor whose dtype has arithmetic."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # The eight-bit floats know how to be converted and little else.
    return tensor.float() if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor

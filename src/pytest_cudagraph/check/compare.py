"""Compare two tensors: equal, close enough, or different, where and by how much."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import torch

from pytest_cudagraph.pytree import kind_of, same_bits

Words = tuple[str, tuple[str, ...]]
"""The message of a difference, and its evidence."""

# (rtol, atol) of torch.testing.assert_close. Every other dtype is compared exactly.
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
    """The difference that ``assert_close`` allows. None is the default of the dtype.

    Integers and booleans are always compared exactly: one token id is not close to another one.
    """

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """``(rtol, atol)`` for values of ``dtype``."""
        if not _is_inexact(dtype):
            return 0.0, 0.0
        rtol, atol = _DTYPE_TOLERANCES.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN. Integers and booleans never are."""
    return _is_inexact(tensor.dtype) and bool(torch.isnan(_dense(tensor)).any())


def spread(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference of two tensors. Infinite if shapes, NaN or infinities differ."""
    if same_bits(first, second):
        return 0.0
    if kind_of(first) != kind_of(second) or first.shape != second.shape:
        return math.inf
    largest = float(_gaps(_dense(first), _dense(second)).max())
    # Beyond 2**53, double precision may round two different integers to the same number.
    return largest if _is_inexact(first.dtype) else max(largest, 1.0)


def rounding_limit(tensor: torch.Tensor, tolerance: Tolerance) -> float:
    """The largest difference between two runs of eager that rounding may explain.

    Sums in another order differ in the last digits. A difference in more than half of the dtype's digits has another
    cause. The limit is ``atol + max(rtol, sqrt(eps)) * largest magnitude``, and 0 for integers.
    """
    if not _is_inexact(tensor.dtype) or not tensor.numel():
        return 0.0
    magnitudes = torch.nan_to_num(_dense(tensor).abs(), nan=0.0, posinf=0.0)
    rtol, atol = tolerance.of(tensor.dtype)
    return atol + max(rtol, math.sqrt(torch.finfo(tensor.dtype).eps)) * float(magnitudes.max())


def compare(eager: torch.Tensor, replay: torch.Tensor, tolerance: Tolerance, noise: float = 0.0) -> Words | None:
    """Compare with ``torch.testing.assert_close``, NaN equal to NaN. None if the tensors are close.

    ``noise`` is the largest difference between two eager runs. Twice this difference is allowed in addition.
    """
    unlike = _unlike(eager, replay)
    if unlike is not None:
        return f"replay gives {unlike[1]} where eager gives {unlike[0]}", ()
    rtol, atol = tolerance.of(eager.dtype)
    atol += 2 * noise
    expected, found = _dense(eager), _dense(replay)
    if _is_close(found, expected, rtol, atol):
        return None
    return _largest_difference(expected, found, (rtol, atol))


def _is_close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    # Equal values need no assert_close, whose first call imports torch's distributed tensors for almost a second.
    if torch.equal(found, expected) or same_bits(found, expected):
        return True
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def furthest(first: torch.Tensor, second: torch.Tensor) -> tuple[str, str]:
    """The two values that differ most, as text, the second with its index. Or the dtypes, devices or shapes."""
    unlike = _unlike(first, second)
    if unlike is not None:
        return unlike
    one, other, place = _extremes(_dense(first), _dense(second), _gaps(_dense(first), _dense(second)))
    return _number(one), f"{_number(other)}{place}"


def _largest_difference(eager: torch.Tensor, replay: torch.Tensor, tolerances: tuple[float, float]) -> Words:
    wrong = ~torch.isclose(replay, eager, rtol=tolerances[0], atol=tolerances[1], equal_nan=True)
    expected, found, place = _extremes(eager, replay, torch.where(wrong, _gaps(eager, replay), -1.0))
    values = f"eager {_number(expected)}, replay {_number(found)}{place}"
    count = f"differing elements: {int(wrong.sum())} of {eager.numel()}"
    message = _distance(expected, found, place, tolerances)
    if message is None:
        return values, (count,)
    return message, (values, count)


def _extremes(first: torch.Tensor, second: torch.Tensor, gaps: torch.Tensor) -> tuple[complex, complex, str]:
    """Both values where the gap is largest, and where that is."""
    position = int(gaps.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), gaps.shape)) if gaps.ndim else ()
    values = first.reshape(-1)[position].item(), second.reshape(-1)[position].item()
    return *values, f" at index {index}" if index else ""


def _distance(expected: complex, found: complex, place: str, tolerances: tuple[float, float]) -> str | None:
    """The difference, and how much is allowed. None for NaN, infinities and booleans."""
    if isinstance(expected, bool) or not (cmath.isfinite(expected) and cmath.isfinite(found)):
        return None
    rtol, atol = tolerances
    allowed = f"{_short(atol + rtol * abs(expected))} is allowed (rtol {rtol:.3g}, atol {atol:.3g})"
    distance = _short(abs(found - expected))
    return f"off by {distance}{place}; {allowed if rtol or atol else 'no difference is allowed'}"


def _short(value: float) -> str:
    """Three digits of a float, all digits of an integer."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(value: complex) -> str:
    """Six digits of a float. Integers and booleans as they are."""
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def _gaps(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Absolute differences in double precision. Infinite if only one side is NaN, or infinities differ."""
    wide = torch.complex128 if first.dtype.is_complex else torch.float64
    gaps = (first.to(wide) - second.to(wide)).abs()
    gaps = torch.where(gaps.isnan(), math.inf, gaps)
    alike = (first == second) | (first.isnan() & second.isnan()) if _is_inexact(first.dtype) else first == second
    return torch.where(alike, 0.0, gaps)


def _unlike(eager: torch.Tensor, replay: torch.Tensor) -> tuple[str, str] | None:
    """The first of dtype, device, layout and shape that differs, as text for each side."""
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
    # Eight-bit floats support conversion and little else.
    return tensor.float() if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor

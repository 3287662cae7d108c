"""The first line of what a compiler raised."""

from __future__ import annotations


def first_line(exc: BaseException) -> str:
    """``RuntimeError: no compiler found``: the exception inside PyTorch's own wrappings, and its first line."""
    inner = exc
    while isinstance(getattr(inner, "inner_exception", None), BaseException):
        inner = inner.inner_exception  # type: ignore[attr-defined]
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    name = type(inner).__name__
    if not lines:
        return name
    return lines[0] if lines[0].startswith(name) else f"{name}: {lines[0]}"

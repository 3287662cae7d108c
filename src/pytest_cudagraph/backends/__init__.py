"""One backend a file: how graphs are captured on one kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_cudagraph.protocols import Backend
    from pytest_cudagraph.values import Kind

__all__ = ["open_backend"]


def open_backend(kind: Kind) -> Backend:
    """The backend of one kind of device; :class:`~pytest_cudagraph.errors.DeviceUnavailable` where it is not there."""
    # Late, so that a run on one kind of device loads nothing of the other.
    if kind == "cpu":
        from pytest_cudagraph.backends.cpu import CpuBackend

        return CpuBackend()
    if kind == "cuda":
        from pytest_cudagraph.backends.cuda import CudaBackend

        return CudaBackend()
    raise ValueError(f"a backend is 'cuda' or 'cpu', not {kind!r}")

"""The backends: how graphs are captured on a CPU and on an NVIDIA GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_cudagraph.protocols import Backend
    from pytest_cudagraph.values import Kind


def open_backend(kind: Kind) -> Backend:
    """Open the backend of one kind of device."""
    # Late, so that a run on one kind of device does not import the other backend.
    if kind == "cpu":
        from pytest_cudagraph.backends.cpu import CpuBackend

        return CpuBackend()
    if kind == "cuda":
        from pytest_cudagraph.backends.cuda import CudaBackend

        return CudaBackend()
    raise ValueError(f"a backend is 'cuda' or 'cpu', not {kind!r}")

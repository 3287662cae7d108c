"""torch's CUDA build on a device that is this process's memory: no GPU, no NVIDIA library. See README.md.

Torch loads :func:`autoload` by itself (the entry point ``torch.backends``).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cuda_emulator import preload

DEVICE_NAME = "Emulated CUDA device (host memory)"


def autoload() -> None:
    """Put the host's kernels under torch's CUDA key, and choose the paths of torch that need no library."""
    import torch

    path = str(_folder() / "libcuda_emulator_operators.so")
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # torch warns once, from C++, that kernels are overridden
    try:
        torch.ops.load_library(path)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
    torch.backends.cudnn.enabled = False
    for choice in ("flash", "mem_efficient", "cudnn"):  # torch chooses these without asking the dispatcher
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)


def launches() -> int:
    """How many kernels this process has launched."""
    return int(_runtime().cuda_emulator_launches())


def unknown_launches() -> dict[str, int]:
    """Kernels that were launched and computed nothing: their names and how often."""
    return _counts(_runtime().cuda_emulator_unknown_names)


def used_bytes(device: int = 0) -> int:
    """Bytes of device memory in use, as ``cudaMemGetInfo`` counts them."""
    return int(_runtime().cuda_emulator_used_bytes(ctypes.c_int(device)))


def _counts(function: Any) -> dict[str, int]:
    size = function(None, ctypes.c_size_t(0))
    text = ctypes.create_string_buffer(size + 1)
    function(text, ctypes.c_size_t(size + 1))
    pairs = (line.split(" ", 1) for line in text.value.decode().splitlines())
    return {name: int(count) for count, name in pairs}


def _folder() -> Any:
    if preload.folder is None:
        raise RuntimeError("the emulated CUDA device is not linked into this environment; run make_environment.py")
    return preload.folder


def _runtime() -> Any:
    runtime = ctypes.CDLL(str(_folder() / "libcudart.so.13"))
    for name in ("launches", "unknown_names", "used_bytes"):
        getattr(runtime, f"cuda_emulator_{name}").restype = ctypes.c_size_t
    return runtime

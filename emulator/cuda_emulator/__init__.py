"""torch's CUDA build on a device that is this process's memory: no GPU, no NVIDIA library. See README.md.

Torch loads :func:`autoload` by itself (the entry point ``torch.backends``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from cuda_emulator import preload

DEVICE_NAME = "Emulated CUDA device (host memory)"
COUNTS_FOLDER = "CUDA_EMULATOR_COUNTS"
"""The environment variable that names a folder. Each process that loads torch writes its counts there as it ends."""


def autoload() -> None:
    """Choose the paths of torch that need no library. :mod:`cuda_emulator.preload` has loaded the operators."""
    import torch

    torch.backends.cudnn.enabled = False
    for choice in ("flash", "mem_efficient", "cudnn"):  # torch chooses these without asking the dispatcher
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)
    _adopt_operators()
    if os.environ.get(COUNTS_FOLDER):
        atexit.register(_write_counts, Path(os.environ[COUNTS_FOLDER]))


def _adopt_operators() -> None:
    """Let the CPU kernels of other libraries compute too: of those that are loaded, and of those that will be."""
    import torch

    def adopting(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(*arguments: Any, **options: Any) -> Any:
            result = load(*arguments, **options)
            preload.adopt_operators()
            return result

        return loaded

    preload.adopt_operators()
    torch.ops.load_library = adopting(torch.ops.load_library)  # type: ignore[method-assign]
    ExtensionFileLoader.exec_module = adopting(ExtensionFileLoader.exec_module)  # type: ignore[method-assign]


def launches() -> int:
    """How many kernels this process has launched."""
    return int(_runtime().cuda_emulator_launches())


def unknown_launches() -> dict[str, int]:
    """Kernels that were launched and computed nothing: their names and how often."""
    return _counts(_runtime().cuda_emulator_unknown_names)


def used_bytes(device: int = 0) -> int:
    """Bytes of device memory in use, as ``cudaMemGetInfo`` counts them."""
    return int(_runtime().cuda_emulator_used_bytes(ctypes.c_int(device)))


@contextlib.contextmanager
def asynchronous(seed: int) -> Iterator[None]:
    """Work waits in its stream's queue until something must wait for it, in an order that ``seed`` chooses.

    The environment variable ``CUDA_EMULATOR_SEED`` does the same for a whole process.
    """
    was_asynchronous = is_asynchronous()
    _runtime().cuda_emulator_set_seed(ctypes.c_longlong(seed))
    try:
        yield
    finally:
        if not was_asynchronous:
            _runtime().cuda_emulator_set_seed(ctypes.c_longlong(-1))


def is_asynchronous() -> bool:
    """Whether work waits in its stream's queue."""
    return bool(_runtime().cuda_emulator_is_asynchronous())


def set_memory(size_bytes: int) -> None:
    """Set the size of each device's memory. What is allocated stays."""
    _runtime().cuda_emulator_set_memory(ctypes.c_size_t(size_bytes))


def fail_allocations(*, after: int = 0, count: int = 1) -> None:
    """Let ``count`` allocations of device memory fail, after the next ``after`` ones. Torch asks again once."""
    _runtime().cuda_emulator_fail_allocations(ctypes.c_longlong(after), ctypes.c_longlong(count))


def clear_error() -> bool:
    """Forget the error of a failed kernel, for which CUDA needs a new process. Returns whether there was one."""
    return bool(_runtime().cuda_emulator_clear_error())


def _write_counts(folder: Path) -> None:
    if folder.is_dir():  # who asked may be gone
        counts = {"launches": launches(), "unknown": unknown_launches()}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(counts), encoding="utf-8")


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

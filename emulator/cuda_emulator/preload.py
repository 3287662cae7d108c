"""Load the emulated libraries into this process before torch asks for them by name. Runs at each start of Python."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

folder: Path | None = None
"""Where the libraries of this environment lie."""


def load(libraries: str) -> None:
    """Load every library of the folder. The operators need torch, so they wait for its import."""
    global folder
    folder = Path(libraries)
    # The runtime first: the driver's library links to it.
    names = ["libcudart.so.13", *sorted(path.name for path in folder.glob("lib*.so.*") if "cudart" not in path.name)]
    for name in names:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _OperatorsBeforeShapes())


class _OperatorsBeforeShapes:
    """Loads the operators in the middle of torch's import: after its C++ code, before ``torch._meta_registrations``.

    That module hides torch's C++ functions for shapes behind Python ones, which cost fifty times as much.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch._meta_registrations":
            sys.meta_path.remove(self)
            _load_operators()


def operators() -> ctypes.CDLL:
    """The library of the operators, which needs torch."""
    if folder is None:
        raise RuntimeError("the emulated CUDA device is not linked into this environment; run make_environment.py")
    return ctypes.CDLL(str(folder / "libcuda_emulator_operators.so"))


def adopt_operators() -> None:
    """Put the CPU kernels of other libraries in the place of their CUDA kernels. Cheap where no library is new."""
    operators().cuda_emulator_adopt()


def _load_operators() -> None:
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # torch warns once, from C++, that kernels are overridden
    try:
        operators().cuda_emulator_install()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)

"""Load the emulated libraries into this process before torch asks for them by name. Runs at each start of Python."""

from __future__ import annotations

import ctypes
from pathlib import Path

folder: Path | None = None
"""Where the libraries of this environment lie."""


def load(libraries: str) -> None:
    """Load every library of the folder but the operators, which need torch."""
    global folder
    folder = Path(libraries)
    # The runtime first: the driver's library links to it.
    names = ["libcudart.so.13", *sorted(path.name for path in folder.glob("lib*.so.*") if "cudart" not in path.name)]
    for name in names:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)

"""How many classes and rooms `cudagraph(model, x)` visits on its way to the baseline file and the table.

    python benchmarks/walk.py

Runs one small test under ``--cudagraph --cudagraph-update`` and follows its calls with ``sys.setprofile``. A room is a
top-level module or package of ``pytest_cudagraph``. Counted are calls from one room to another, among the rooms that
know the order of a run (:data:`SPINE`); of those calls the classes of this package that they hand on, as an argument or
as the result. What a room does by itself is not counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGE = "pytest_cudagraph"
SPINE = ("plugin", "session", "pipeline", "summary")
"""Rooms whose calls are followed. The others do their own work when they are called."""

_TEST = """
import pytest, torch

@pytest.mark.graph_speedup(min=0.01, batch_sizes=(1, 2))
def test_model(cudagraph):
    cudagraph(torch.nn.Linear(8, 8).eval(), torch.randn(1, 8))
"""


def room_of(module: str) -> str:
    """The room of a module. Empty for one of another package."""
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == PACKAGE and rest else ""


class Walk:
    """The rooms entered and the classes handed on."""

    def __init__(self) -> None:
        self.rooms: list[str] = []
        self.classes: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        callee = room_of(frame.f_globals.get("__name__", ""))
        caller = room_of(frame.f_back.f_globals.get("__name__", "")) if frame.f_back else ""
        if event not in ("call", "return") or callee == caller or caller not in SPINE or not callee:
            return
        if event == "call":
            self.rooms.append(callee)
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        else:
            values = [result]
        for value in values:
            if room_of(type(value).__module__) and not isinstance(value, type):
                self.classes[type(value).__name__] += 1


def main() -> int:
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_walk.py")
        test.write_text(_TEST)
        options = ["--cudagraph", "--cudagraph-device=cpu", "--cudagraph-update", "--cudagraph-time-budget=0.3", "-q"]
        sys.setprofile(walk)
        try:
            status = pytest.main([str(test), f"--rootdir={folder}", "-p", "no:cacheprovider", *options])
        finally:
            sys.setprofile(None)
    rooms = list(dict.fromkeys(walk.rooms))
    print(f"{len(rooms)} rooms: {', '.join(rooms)}")
    print(f"{len(walk.classes)} classes: {', '.join(sorted(walk.classes))}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

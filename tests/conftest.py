"""What every test may use: pytester, and goldens for the texts a user reads. Where coverage is taken."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GOLDEN = Path(__file__).parent / "golden"

# Models of a few numbers are slower on several threads. Read when torch is loaded, also by processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# Runs that tests start write no summary of the step in which this project is tested.
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
    os.environ.pop(name, None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Coverage is taken of the workers alone, not of the processes that tests start.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


class Heap:
    """Pytest, the product and torch collect garbage in most tests. What was imported need not be searched each time."""

    def __init__(self):
        self.modules = 0

    def freeze(self):
        if len(sys.modules) > self.modules + 50:
            gc.collect()
            gc.freeze()
            self.modules = len(sys.modules)


heap = Heap()


def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Coverage is of the packages without torch. It makes tests that run torch half as slow again."""
    heap.freeze()
    tracer = sys.gettrace()
    if _is_traced(item) or not type(tracer).__module__.startswith("coverage"):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def _is_traced(item):
    heavy = {"project", "kind"} & {*item.fixturenames} or {"torch", "np"} & vars(item.module).keys()
    return not heavy and item.get_closest_marker("slow") is None


@pytest.fixture
def no_collections(monkeypatch):
    """A collection of everything torch holds takes a fifth of a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def known_frozen(monkeypatch):
    """The heap is frozen (see above). A capture on CUDA asks for the count, and Python walks a million objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)


@pytest.fixture
def golden():
    """Compare a text with ``tests/golden/NAME``; ``GOLDEN=update pytest`` rewrites it, for review in the diff."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        found = text.rstrip() + "\n"
        if os.environ.get("GOLDEN") == "update":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert found == expected, f"{path.name} differs; GOLDEN=update rewrites it for review"

    return check


@pytest.fixture
def on_gpu():
    """Make a fake tensor that claims to lie on a GPU. It needs no driver and has no values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def make(*shape, dtype=torch.float32):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.empty(shape, dtype=dtype, device="cuda:0")

    return make


@pytest.fixture
def packaged_as_exported(monkeypatch):
    """AOTInductor without its compiler: a package is the exported program. Gives the folders they were built in."""
    import torch

    from pytest_cudagraph.compile import aot

    built = []

    def build(program, folder, settings, timeout_s):
        built.append(folder)
        torch.export.save(program, folder / "package.pt2")
        return folder / "package.pt2", ()

    def load(package, device):
        module = torch.export.load(package).module()
        return lambda tensors: list(module(*tensors))

    monkeypatch.setattr(aot, "build", build)
    monkeypatch.setattr(aot, "load", load)
    return built

"""A user's project in a folder of its own. Most runs share this process, because an import of torch takes seconds."""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
import warnings
from pathlib import Path

import pytest

MODELS = """
import torch
from torch import nn

torch.manual_seed(0)


def is_captured():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA does not answer
        return False


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


class SlowUnderCapture(Mlp):
    '''What a library that asks whether it is being captured can do to a graph: the same numbers, more work.'''

    def forward(self, x):
        y = super().forward(x)
        if is_captured():
            for _ in range(400):
                y = y * 1.0
        return y


class WrongUnderCapture(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y * 1.5 if is_captured() else y


class ReadsTheHost(Mlp):
    def forward(self, x):
        y = super().forward(x)
        scale = y.abs().max().item()
        return y / scale


class BakesItsStep(Mlp):
    step = 0

    def forward(self, x):
        self.step += 1
        return super().forward(x) * self.step
"""

CLOCK = """
import time
from pytest_cudagraph.measure import PerfCounterClock

PerfCounterClock.now_ns = PerfCounterClock.cpu_time_ns = lambda clock: 10 * time.thread_time_ns()
"""
"""The CPU time of the thread, which does not depend on what else the machine does. Ten times as fast, which saves nine
tenths of each measurement."""

_OPTIONS_OF_A_PROCESS = {"-n", "-W"}
"""Runs with these options get a process of their own: workers are processes, and imports warn once in a process."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
_UNIT = re.compile(r"N (?:ns|µs|ms|s)\b")
_DISTURBANCES = ("during the measurement; the pairing of samples", "only one arm was disturbed")
"""A line that a noisy machine adds."""

_DEVICE = re.compile(r"cpu: .*?, torch N\S*")


class Libraries:
    """Pytester forgets each module that a run imported. Torch cannot be imported twice, so libraries stay."""

    def __init__(self, projects: Path) -> None:
        self.projects = f"{projects}{os.sep}"
        self.modules = {}

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self.modules |= {name: module for name, module in sys.modules.items() if not self._is_of_a_project(module)}

    def put_back(self) -> None:
        sys.modules.update(self.modules)

    def _is_of_a_project(self, module) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(self.projects)


class Project:
    """A folder with models, a conftest and tests."""

    def __init__(self, pytester: pytest.Pytester, libraries: Libraries) -> None:
        self.pytester = pytester
        self.libraries = libraries
        self.path = pytester.path
        pytester.makepyfile(models=MODELS)
        pytester.makeconftest("")

    def write(self, name: str = "test_user", **tests: str) -> None:
        """Write a test file: each keyword is a test's name, its value the body (the fixture is ``cudagraph``)."""
        lines = ["import pytest, torch", "from models import *", ""]
        for test, body in tests.items():
            lines += [f"def test_{test}(cudagraph):", *(f"    {line}" for line in body.splitlines()), ""]
        self.pytester.makepyfile(**{name: "\n".join(lines)})

    def run(self, *arguments: str) -> pytest.RunResult:
        """A run in this process if it can be, by the clock above."""
        if _OPTIONS_OF_A_PROCESS.intersection(arguments):
            self.pytester.makepyfile(cpu_clock=CLOCK)
            return self.run_alone("-p", "cpu_clock", *arguments)
        import torch

        from pytest_cudagraph.measure import PerfCounterClock

        folder, state = Path.cwd(), random.getstate()
        linecache.clearcache()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
                warnings.resetwarnings()
                for reading in ("now_ns", "cpu_time_ns"):
                    patch.setattr(PerfCounterClock, reading, getattr(PerfCounterClock, reading))
                exec(CLOCK, {})
                return self.pytester.runpytest_inprocess(*arguments, plugins=[self.libraries], no_reraise_ctrlc=True)
        finally:
            self.libraries.put_back()
            random.setstate(state)
            os.chdir(folder)

    def run_alone(self, *arguments: str) -> pytest.RunResult:
        """A run in a process of its own."""
        return self.pytester.runpytest_subprocess(*arguments)

    def measure(self, *arguments: str) -> pytest.RunResult:
        """A run that gates the twin's own numbers, quickly."""
        options = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-time-budget=10", "--cudagraph-batch-sizes=1,2")
        # On a busy machine one run may be much slower than the one before; tests of that gate give their own limit.
        return self.run(*options, "--cudagraph-max-slowdown=inf", *arguments)

    @property
    def baseline(self) -> Path:
        """The one baseline file there is."""
        (path,) = self.path.glob(".cudagraph/*.json")
        return path


@pytest.fixture(autouse=True)
def libraries(tmp_path_factory):
    """Ends after pytester, which forgets modules once more."""
    libraries = Libraries(tmp_path_factory.getbasetemp())
    yield libraries
    libraries.put_back()


@pytest.fixture
def project(libraries, pytester, monkeypatch):
    # Python trusts compiled code for a second, and the tests rewrite their files more often.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Project(pytester, libraries)


def failure_of(result: pytest.RunResult) -> str:
    """The message of the failing test, with every figure masked: what a reader sees but for the numbers."""
    told = [line[4:] for line in result.outlines if line.startswith("E ")]
    lines = [line for line in told if not any(words in line for words in _DISTURBANCES)]
    # Said on a quiet machine only.
    return masked("\n".join(lines).replace(": compute-bound", ""))


def masked(text: str) -> str:
    """The same text on every machine: figures, units and the device's name replaced."""
    text = _UNIT.sub("TIME", _NUMBER.sub("N", text))
    return _DEVICE.sub("cpu: NAME, torch N", text)

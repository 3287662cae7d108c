"""A user's project in a folder of its own, run by a pytest of its own: torch is imported once per process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MODELS = """
import torch
from torch import nn


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

CONFTEST = """
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
"""

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
_UNIT = re.compile(r"N (?:ns|µs|ms|s)\b")
_DISTURBANCES = ("during the measurement; pairing keeps that out", "one arm alone was disturbed")
"""A line that a noisy machine adds."""

_DEVICE = re.compile(r"cpu: .*?, torch N\S*")


class Project:
    """A folder with models, a conftest and tests; every run is a process of its own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        pytester.makepyfile(models=MODELS)
        pytester.makeconftest(CONFTEST)

    def write(self, name: str = "test_user", **tests: str) -> None:
        """Write a test file: each keyword is a test's name, its value the body (the fixture is ``cudagraph``)."""
        lines = ["import pytest, torch", "from models import *", ""]
        for test, body in tests.items():
            lines += [f"def test_{test}(cudagraph):", *(f"    {line}" for line in body.splitlines()), ""]
        self.pytester.makepyfile(**{name: "\n".join(lines)})

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    def measure(self, *arguments: str) -> pytest.RunResult:
        """A run that gates the twin's own numbers, quickly."""
        options = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-time-budget=2", "--cudagraph-batch-sizes=1,2")
        # On a busy machine one run may be much slower than the one before; tests of that gate give their own limit.
        return self.run(*options, "--cudagraph-max-slowdown=inf", *arguments)

    @property
    def baseline(self) -> Path:
        """The one baseline file there is."""
        (path,) = self.path.glob(".cudagraph/*.json")
        return path


@pytest.fixture
def project(pytester):
    return Project(pytester)


def failure_of(result: pytest.RunResult) -> str:
    """The message of the failing test, with every figure masked: what a reader sees but for the numbers."""
    told = [line[4:] for line in result.outlines if line.startswith("E ")]
    lines = [line for line in told if not any(words in line for words in _DISTURBANCES)]
    return masked("\n".join(lines))


def masked(text: str) -> str:
    """The same text on every machine: figures, units and the device's name replaced."""
    text = _UNIT.sub("TIME", _NUMBER.sub("N", text))
    return _DEVICE.sub("cpu: NAME, torch N", text)

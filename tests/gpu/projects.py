"""A user's project, run by a pytest of its own beside the one that runs these tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.gpu.sizes import on_emulated_device
from tests.plugin.conftest import MODELS

import pytest_cudagraph

OPTIONS = ("--cudagraph", "--cudagraph-device=cuda", "--cudagraph-batch-sizes=1,4")
TIMEOUT_S = 300

DEEP = """

class Deep(nn.Module):
    '''Launch-bound: what a graph is for.'''

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(16, 16), nn.GELU())])

    def forward(self, x):
        return self.layers(x)


class Waits(nn.Module):
    '''Bound by the device, and never by its power limit: one kernel counts cycles for about a millisecond.'''

    def forward(self, x):
        torch.cuda._sleep(2_000_000)
        return x + 1
"""

CONFTEST = """
from pytest_cudagraph.monitor import readings

counted = readings._others
# The pytest that runs this one holds the GPU too and computes nothing meanwhile, which the driver cannot know.
readings._others = lambda processes: max(counted(processes) - 1, 0)
"""


class Project:
    """Loads the plugin as it was loaded here: from the source tree, or as it is installed."""

    def __init__(self, pytester: pytest.Pytester, *, is_installed: bool) -> None:
        self.pytester, self.path = pytester, pytester.path
        # The installed plugin goes by the name of its entry point; loading it twice is an error of pytest's.
        self._load = () if is_installed else ("-p", "pytest_cudagraph.plugin")
        pytester.makepyfile(models=MODELS + DEEP)
        pytester.makeconftest(CONFTEST)

    def __call__(self, body: str, *arguments: str) -> pytest.RunResult:
        """Run one test of this body."""
        self.write(body)
        return self.run(*arguments)

    def write(self, body: str, mark: str = "") -> None:
        """The one test there is, ``test_user.py::test_one``."""
        lines = [f"    {line}" for line in body.splitlines()]
        signature = "def test_one(cudagraph, capture_graphs, assert_replay_close, measure_speedup):"
        head = ["import pytest, torch", "from models import *", "torch.manual_seed(0)"]
        self.pytester.makepyfile(test_user="\n".join([*head, *filter(None, [mark]), signature, *lines]))

    def run(self, *arguments: str, timeout: float = TIMEOUT_S) -> pytest.RunResult:
        budget_s = 1 if on_emulated_device() else 5  # no speed is judged there
        options = (*OPTIONS, f"--cudagraph-time-budget={budget_s}")
        told = (*self._load, "-p", "no:cacheprovider", *options, *arguments)
        return self.pytester.runpytest_subprocess(*told, timeout=timeout)

    def measured(self, *arguments: str) -> dict:
        """Run once more, and give what the run's document says of the first batch size."""
        self.run("--cudagraph-json=run.json", *arguments)
        return self.document["tests"][0]["batches"][0]

    @property
    def document(self) -> dict:
        """What ``--cudagraph-json=run.json`` wrote."""
        return json.loads((self.path / "run.json").read_text(encoding="utf-8"))

    @property
    def baseline(self) -> Path:
        """The one baseline file there is."""
        (path,) = self.path.glob(".cudagraph/*.json")
        return path


def source_first() -> str:
    """``PYTHONPATH`` with the very package that is loaded here in front."""
    source = Path(pytest_cudagraph.__file__).resolve().parents[1]
    return os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))

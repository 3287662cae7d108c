"""``-p cuda_emulator.pytest_plugin``: fails a test that launched a kernel which computed nothing, or broke the device.

Counts the launches of this process and of the processes that a test starts. A test marked ``needs_speed`` or
``needs_triton`` is skipped with the marker's reason.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import cuda_emulator

# Threads of several processes wait for each other by spinning. Read when torch is loaded, hence here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKERS = ("needs_speed", "needs_triton")
_ELSEWHERE = pytest.StashKey["Counter[str]"]()
"""Launches of other processes: those that tests started, and the workers of pytest-xdist."""
_ALL = ""
"""The key of all launches. The other keys are names of what computed nothing."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ELSEWHERE] = Counter()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in MARKERS:
        marker = item.get_closest_marker(name)
        if marker is not None:
            pytest.skip(f"{name}: {marker.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    before = Counter(cuda_emulator.unknown_launches())
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(cuda_emulator.COUNTS_FOLDER, folder)
        try:
            result = yield
        finally:
            elsewhere = _counts_of_processes(Path(folder), item.config.stash[_ELSEWHERE])
    new = Counter(cuda_emulator.unknown_launches()) - before + elsewhere
    if cuda_emulator.clear_error():
        pytest.fail("a kernel failed, and the test did not clear the device's error")
    if new:
        pytest.fail("launched kernels that computed nothing: " + ", ".join(f"{n} x {k}" for k, n in new.items()))
    return result


def _counts_of_processes(folder: Path, total: Counter[str]) -> Counter[str]:
    """The unknown launches of the processes that have ended. Adds all their launches to ``total``."""
    unknown: Counter[str] = Counter()
    for path in folder.glob("*.json"):
        counts = json.loads(path.read_text(encoding="utf-8"))
        unknown.update(counts["unknown"])
        total[_ALL] += counts["launches"]
    total.update(unknown)
    return unknown


def _launches(config: pytest.Config) -> Counter[str]:
    """All launches, and those that computed nothing by name."""
    here = {_ALL: cuda_emulator.launches(), **cuda_emulator.unknown_launches()}
    return config.stash[_ELSEWHERE] + Counter(here)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cuda_emulator"] = dict(_launches(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # a worker that crashed has none
        node.config.stash[_ELSEWHERE].update(node.workeroutput["cuda_emulator"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = _launches(terminalreporter.config)
    launches = counts.pop(_ALL, 0)
    # A test that fails or is skipped after such a launch does not fail for it. So they are named here.
    names = f": {', '.join(sorted(counts))}" if counts else ""
    terminalreporter.write_line(f"emulated CUDA device: {launches} launches, {counts.total()} not emulated{names}")

"""Blocks taken while another process works on the GPU decide nothing; those of a GPU of one's own do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tests.gpu.processes import HERE, TIMEOUT_S
from tests.gpu.small_models import Mlp

from pytest_cudagraph import device, measure, stats
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.measure.timer import Bounds
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.units import to_ns

LAUNCH_BOUND = "cudagraph(Deep().eval(), torch.randn(1, 16))"


@pytest.fixture
def neighbour(request):
    """A context manager: another process works on the device, or the emulated device's driver says so."""
    if device.why_no_gpu() != device.EMULATED:
        return busy_neighbour
    answers = {"nvmlDeviceGetComputeRunningProcesses": {4242: 2**30}}
    return partial(request.getfixturevalue("answering"), answers)


@contextmanager
def busy_neighbour():
    """Another process at work on this GPU; skips where the driver does not list it."""
    command = [sys.executable, str(HERE / "busy_process.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "works\n", "the neighbour has not begun"
        with PerfMonitor() as watch:
            pass
        if not watch.card.gpus or not watch.card.gpus[0].is_shared:
            pytest.skip(f"the driver lists no other process on this machine: {watch.card.notes}")
        yield
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=TIMEOUT_S)


@pytest.fixture
def timed(backend, capture):
    """Measures a launch-bound model as the plugin does: blocks are vetted by the real monitor."""
    model, x = Mlp(depth=16).cuda().eval(), torch.randn(1, 64, device=backend.device)
    graph = capture(model, x)

    def timed(budget_s):
        with backend.running(), PerfMonitor() as watch:
            return measure.measure_arms(
                measure.Arms(eager=lambda: model(x), replay=lambda: graph(x)),
                clock=PerfCounterClock(),
                rule=stats.EvidenceRule(1.15),
                bounds=Bounds.of_budget(to_ns(budget_s)),
                seed=1,
                synchronize=backend.synchronize,
                disturbance=watch.check,
            )

    return timed


@pytest.mark.needs_speed("a launch-bound model is faster on a GPU")
def test_on_a_gpu_of_its_own_the_gate_decides(timed):
    assert timed(8).decision == "pass"


def test_beside_a_neighbour_every_block_is_thrown_away_and_afterwards_none(timed, neighbour):
    with neighbour():
        disturbed = timed(2)
    assert disturbed.decision == "open", disturbed
    assert disturbed.discarded > 0
    assert "shared with another process" in disturbed.disturbance
    alone = timed(2)
    assert (alone.disturbance, alone.discarded) == ("", 0), alone
    assert alone.blocks > 0


@pytest.mark.needs_speed("where nothing is judged no verdict is inconclusive")
def test_beside_a_neighbour_the_plugin_is_inconclusive_names_it_and_saves_nothing(project, neighbour):
    project.write(LAUNCH_BOUND)
    with neighbour():
        result = project.run("--cudagraph-json=run.json", "--cudagraph-update", "--cudagraph-time-budget=2")
    result.assert_outcomes(passed=1, warnings=None)
    for batch in project.document["tests"][0]["batches"]:
        assert batch["verdict"] == "inconclusive", batch
        assert "shared with another process" in batch["reason"], batch
    assert not list(project.path.glob(".cudagraph/*.json"))


@pytest.mark.needs_speed("strict fails anyway where nothing is judged")
def test_strict_fails_beside_a_neighbour(project, neighbour):
    project.write(LAUNCH_BOUND)
    with neighbour():
        result = project.run("--cudagraph-strict", "--cudagraph-time-budget=2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*shared with another process*"])

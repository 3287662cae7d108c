"""Each xdist worker measures on a GPU of its own. Needs a machine with two GPUs. The emulated machine can have two."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.sizes import on_emulated_device

from pytest_cudagraph.gpu_locks import short

TESTS = """
import os, torch
from models import *

def measure(cudagraph):
    assert torch.cuda.device_count() == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    cudagraph(Deep().eval(), torch.randn(1, 16), min_speedup=0.01, batch_sizes=[1])

def test_one(cudagraph):
    measure(cudagraph)

def test_two(cudagraph):
    measure(cudagraph)
"""


def test_two_workers_measure_on_two_gpus(project, monkeypatch, tmp_path):
    if on_emulated_device():
        monkeypatch.setenv("CUDA_EMULATOR_DEVICES", "2")
    elif torch.cuda.device_count() < 2:
        pytest.skip("this machine shows one GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    project.pytester.makepyfile(test_user=TESTS)
    # xdist gives one of two tests to each of two workers.
    result = project.run("-p", "no:benchmark", "-n", "2", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2)
    gpus = {test["nodeid"]: test["gpu"] for test in project.document["tests"]}
    assert len(set(gpus.values())) == 2
    found = [f"*{short(gpu)} measured {nodeid}" for nodeid, gpu in sorted(gpus.items(), key=lambda each: each[1])]
    result.stdout.fnmatch_lines(["cudagraph: gw0 measures on *", "cudagraph: gw1 measures on *", *found])
    words = "this is an emulated CUDA device" if on_emulated_device() else "2 passed"
    result.stdout.fnmatch_lines([f"*{words}*"])

"""The pytest plugin finds kernels that computed nothing, also in the processes that a test starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import cuda_emulator
import pytest

NOT_COMPUTED = "import torch; torch.batch_norm_stats(torch.ones(2, 3, device='cuda'), 1e-5); torch.cuda.synchronize()"
ADDS = "import torch; torch.ones(1, device='cuda').add_(1)"
STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"


@pytest.fixture
def run(tmp_path):
    """Run one test of this body with the plugin, in a process of its own. Returns what that pytest printed."""

    def run(body, *arguments):
        (tmp_path / "test_one.py").write_text(f"def test_it():\n    {body}\n", encoding="utf-8")
        # Without the folder, what computes nothing there does not count here.
        environment = {name: text for name, text in os.environ.items() if name != cuda_emulator.COUNTS_FOLDER}
        options = ("-p", "cuda_emulator.pytest_plugin", "-p", "no:cudagraph", "-p", "no:cacheprovider", *arguments)
        command = [sys.executable, "-m", "pytest", *options, "test_one.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        return done.stdout

    return run


def launches(output):
    """The launches that the plugin tells at the end of a run, and how many of them computed nothing."""
    found = re.search(
        r"^emulated CUDA device: (\d+) launches, (\d+) not emulated(?:: .*batch_norm.*)?$", output, re.MULTILINE
    )
    assert found, output
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("body", [NOT_COMPUTED, STARTS.format(code=NOT_COMPUTED)], ids=["here", "in a process"])
def test_a_launch_that_computed_nothing_fails_the_test(run, body):
    output = run(body)
    assert re.search(r"^E +Failed: launched kernels that computed nothing: 1 x \S*batch_norm", output, re.MULTILINE)
    assert launches(output)[1] == 1


@pytest.mark.parametrize("workers", ["0", "1"])
def test_launches_of_processes_and_workers_are_counted(run, workers):
    pytest.importorskip("xdist")
    output = run(STARTS.format(code=ADDS), "-n", workers)
    assert launches(output) == (2, 0), output


def test_a_test_that_leaves_a_failed_kernel_fails_and_the_next_one_does_not(run):
    broken = "import torch; torch.arange(2, device='cuda')[torch.tensor([9], device='cuda')] if 1 else 0"
    body = f"""import pytest
    with pytest.raises(RuntimeError):
        {broken}
        __import__("torch").cuda.synchronize()

def test_next():
    __import__("torch").cuda.synchronize()
"""
    output = run(body)
    assert "a kernel failed, and the test did not clear the device's error" in output
    assert "1 failed, 1 passed" in output

"""The plugin on an emulated CUDA device: graphs are captured and checked, and the device never passes for a GPU."""

from __future__ import annotations

import pytest

from pytest_cudagraph import device
from pytest_cudagraph.cli import main
from pytest_cudagraph.values import is_emulated

NO_GPU = "an emulated CUDA device, which is no GPU"


@pytest.fixture(autouse=True)
def _emulated():
    if device.why_no_gpu() != device.EMULATED:
        pytest.skip("this machine's CUDA device is a GPU")


@pytest.mark.parametrize("option", ["auto", "cuda"])
def test_graphs_are_checked_and_no_speed_is_judged_or_saved(project, option):
    result = project(
        "cudagraph(Deep().eval(), torch.randn(1, 16), min_speedup=1000)",
        f"--cudagraph-device={option}",
        "--cudagraph-update",
        "--cudagraph-json=run.json",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "cudagraph: Emulated CUDA device (host memory), no GPU, torch *; rehearsal: speed is not judged",
            "Emulated CUDA device (host memory), no GPU, torch *",
            "*not judged",
            f"speed is not judged: this is {NO_GPU} (2 batch sizes)",
        ]
    )
    assert not list(project.path.glob(".cudagraph/*"))
    assert is_emulated(project.document["device"]["name"])
    for batch in project.document["tests"][0]["batches"]:
        assert batch["verdict"] == "not-judged"
        assert batch["check"] is not None


def test_a_wrong_replay_fails(project):
    result = project("cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*ReplayMismatch*"])


def test_it_is_not_the_gpu_that_a_run_requires(project):
    result = project("cudagraph(Deep().eval(), torch.randn(1, 16))", "--cudagraph-require-gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --cudagraph-require-gpu requires a GPU, and no GPU can be used", f"found: {NO_GPU}; *"]
    )


def test_the_doctor_calls_it_unfit(capsys):
    assert main(["doctor", "--device=cuda", "--time-budget=1"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"unfit: this is {NO_GPU}; {device.EMULATED.remedy}" in said
    assert any(line.startswith("device: Emulated CUDA device (host memory), no GPU, torch") for line in said), said

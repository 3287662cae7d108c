"""``--cudagraph-base`` on a GPU: ten processes, one at a time, of which none takes those that wait for a neighbour."""

from __future__ import annotations

import shutil
import subprocess

import pytest

TIMEOUT_S = 500

DEPTH = """
import torch
from torch import nn

DEPTH = {depth}


def layers(depth):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.GELU())]).eval()
"""

TESTS = """
import torch
from depth import DEPTH, layers


def test_changed(cudagraph):
    cudagraph(layers(DEPTH), torch.randn(1, 16), min_speedup=0.01)


def test_unchanged(cudagraph):
    cudagraph(layers(8), torch.randn(1, 16), min_speedup=0.01)
"""


@pytest.fixture
def git(project):
    """Runs git in the project."""
    if shutil.which("git") is None:
        pytest.skip("git is not on the path")

    def git(*arguments):
        identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "init.defaultBranch=main")
        command = ["git", "-C", str(project.path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    return git


@pytest.mark.needs_speed("it compares two speeds")
@pytest.mark.slow
def test_a_replay_of_twice_the_kernels_is_slower_than_the_base_and_an_unchanged_one_is_not(project, git):
    (project.path / "test_user.py").write_text(TESTS, encoding="utf-8")
    depth = project.path / "depth.py"
    depth.write_text(DEPTH.format(depth=8), encoding="utf-8")
    git("add", "--all")
    git("commit", "--quiet", "--message", "a commit")
    depth.write_text(DEPTH.format(depth=24), encoding="utf-8")
    # A fifth of difference between processes would be noise of a machine that cannot judge anything.
    options = ("--cudagraph-batch-sizes=1", "--cudagraph-base-slowdown=0.2", "--cudagraph-base=HEAD")
    result = project.run(*options, timeout=TIMEOUT_S)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*SlowerThanBase: batch 1: replay is * slower than in HEAD (*)*, 99% interval *; allowed is 20 %",
            "E*base -> head: replay * -> * µs, lower quartiles in * pairs of processes, in turn",
            "test_user.py::test_changed * slower",
            "test_user.py::test_unchanged * passed",
        ]
    )
    assert len(git("worktree", "list").splitlines()) == 1

"""The packaging process: stopped with everything it started, and heard when it fails."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from pytest_cudagraph.compile import packages
from pytest_cudagraph.compile.packages import BuildOptions, build, run_child
from pytest_cudagraph.errors import CudagraphError, first_line

FAMILY = """
import subprocess, sys
grandchild = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[int(sys.argv[1])])
sys.stdout.write("started")
sys.stdout.flush()
grandchild.wait()
"""
"""A child that never ends, and one of its own that holds the pipe of the first argument."""


@pytest.fixture
def settings():
    return BuildOptions.here({})


@pytest.fixture
def program():
    with torch.no_grad():
        return torch.export.export(torch.nn.ReLU(), (torch.ones(2),), strict=False)


def test_the_exit_code_comes_back(tmp_path):
    command = [sys.executable, "-c", "import sys; print('said'); sys.exit(5)"]
    assert run_child(command, tmp_path / "log", 60.0) == 5
    assert (tmp_path / "log").read_text().strip() == "said"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_late_child_dies_with_all_it_started(tmp_path, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, pass_fds=[write]))
    try:
        with pytest.raises(TimeoutError, match="not packaged within 1 s"):
            run_child([sys.executable, "-c", FAMILY, str(write)], tmp_path / "log", 1.0)
        os.close(write)
        # The end of the pipe: nobody holds the other end any more, neither the child nor the grandchild.
        assert os.read(read, 1) == b""
    finally:
        os.close(read)
    assert (tmp_path / "log").read_text() == "started"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_child_whose_parent_dies_ends_itself(tmp_path, settings):
    (tmp_path / packages.SETTINGS).write_bytes(pickle.dumps(settings))
    os.mkfifo(tmp_path / packages.PROGRAM)
    # Blocked on a program that never comes, it hears of its parent through standard input only.
    child = subprocess.Popen(packages.child_command(tmp_path), stdin=subprocess.PIPE, start_new_session=True)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_a_program_that_cannot_travel_is_packaged_here(tmp_path, settings, program, monkeypatch):
    def fail(*args):
        raise ValueError("no serializer for this type")

    monkeypatch.setattr(torch.export, "save", fail)
    packaged = []
    monkeypatch.setattr(packages, "package", lambda program, path, settings: packaged.append(path))
    path, notes = build(program, tmp_path, settings, 60.0)
    assert packaged == [path] == [tmp_path / "package.pt2"]
    assert notes == ("packaged in this process: another process cannot load the exported program",)


def test_a_program_that_the_child_cannot_load_is_packaged_here(tmp_path, settings, program, monkeypatch):
    monkeypatch.setattr(packages, "run_child", lambda *args: packages.NOT_LOADED)
    packaged = []
    monkeypatch.setattr(packages, "package", lambda program, path, settings: packaged.append(path))
    assert build(program, tmp_path, settings, 60.0)[1] != ()
    assert packaged == [tmp_path / "package.pt2"]


def test_a_failure_in_the_child_is_reported(tmp_path, settings, program, monkeypatch):
    def fail(command, log, timeout_s):
        (tmp_path / packages.FAILURE).write_text(json.dumps("InvalidCxxCompiler: no compiler"))
        return packages.FAILED

    monkeypatch.setattr(packages, "run_child", fail)
    with pytest.raises(CudagraphError, match=r"^InvalidCxxCompiler: no compiler$"):
        build(program, tmp_path, settings, 60.0)


def test_a_child_that_dies_leaves_its_last_words(tmp_path, settings, program, monkeypatch):
    def die(command, log, timeout_s):
        log.write_text("".join(f"line {i}\n" for i in range(9)))
        return -11

    monkeypatch.setattr(packages, "run_child", die)
    with pytest.raises(CudagraphError) as raised:
        build(program, tmp_path, settings, 60.0)
    assert str(raised.value) == (
        "the packaging process ended with exit code -11\n    line 4\n    line 5\n    line 6\n    line 7\n    line 8"
    )


def test_packaging_runs_under_the_settings_of_its_order_and_puts_them_back(monkeypatch, tmp_path):
    from torch._inductor import config

    seen = []

    def package(program, *, package_path):
        seen.append((torch.get_num_threads(), torch.get_float32_matmul_precision(), config.freezing, package_path))

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", package)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), config.freezing
    settings = BuildOptions(
        options={"freezing": not config.freezing}, threads=1, matmul_precision="high", is_deterministic=False
    )
    packages.package(None, tmp_path / "package.pt2", settings)
    assert seen == [(1, "high", not before[2], str(tmp_path / "package.pt2"))]
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision(), config.freezing) == before


def test_the_first_line_is_that_of_the_innermost_cause():
    wrapped = RuntimeError("backend raised:\nmore")
    wrapped.inner_exception = ValueError("\n  no such option\nsecond")
    assert first_line(wrapped) == "ValueError: no such option"
    assert first_line(ValueError("ValueError: twice")) == "ValueError: twice"
    assert first_line(KeyError()) == "KeyError"

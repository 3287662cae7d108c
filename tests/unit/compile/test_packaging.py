"""The packaging process: stopped with everything it started, and heard when it fails."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess

import pytest
import torch

from pytest_cudagraph.child_process import PARENT
from pytest_cudagraph.compile import packages
from pytest_cudagraph.compile.packages import BuildOptions, build
from pytest_cudagraph.errors import CudagraphError, first_line


@pytest.fixture
def settings():
    return BuildOptions.here({})


@pytest.fixture
def program():
    with torch.no_grad():
        return torch.export.export(torch.nn.ReLU(), (torch.ones(2),), strict=False)


def test_a_late_child_is_a_timeout(tmp_path, settings, program, monkeypatch):
    def hang(command, *, timeout_s, **options):
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(packages, "run_child", hang)
    with pytest.raises(TimeoutError, match="not packaged within 1 s"):
        build(program, tmp_path, settings, 1.0)


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_a_child_whose_parent_dies_ends_itself(tmp_path, settings):
    (tmp_path / packages.SETTINGS).write_bytes(pickle.dumps(settings))
    os.mkfifo(tmp_path / packages.PROGRAM)
    reading, writing = os.pipe()
    # Blocked on a program that never comes, it hears of its parent through the pipe only.
    with subprocess.Popen(
        packages.child_command(tmp_path), env={**os.environ, PARENT: str(reading)}, pass_fds=[reading],
        start_new_session=True,
    ) as child:  # fmt: skip
        os.close(reading)
        os.close(writing)
        assert child.wait() == -signal.SIGKILL


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
    monkeypatch.setattr(packages, "run_child", lambda *args, **options: packages.NOT_LOADED)
    packaged = []
    monkeypatch.setattr(packages, "package", lambda program, path, settings: packaged.append(path))
    assert build(program, tmp_path, settings, 60.0)[1] != ()
    assert packaged == [tmp_path / "package.pt2"]


def test_a_failure_in_the_child_is_reported(tmp_path, settings, program, monkeypatch):
    def fail(command, **options):
        (tmp_path / packages.FAILURE).write_text(json.dumps("InvalidCxxCompiler: no compiler"))
        return packages.FAILED

    monkeypatch.setattr(packages, "run_child", fail)
    with pytest.raises(CudagraphError, match=r"^InvalidCxxCompiler: no compiler$"):
        build(program, tmp_path, settings, 60.0)


def test_a_child_that_dies_leaves_its_last_words(tmp_path, settings, program, monkeypatch):
    def die(command, *, log, **options):
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

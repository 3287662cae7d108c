"""What the build needs, and what it says where that is missing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import make_environment
import pytest
from cuda_emulator import build

ROOT = Path(__file__).parents[2]


def test_a_machine_without_a_compiler_is_one_clear_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "g++" else f"bin/{tool}")
    monkeypatch.setattr(sys, "argv", ["make_environment.py", str(tmp_path / "environment")])
    assert make_environment.main() == 1
    assert capsys.readouterr().err == (
        "the emulated CUDA device is compiled, and this machine has no g++\n"
        "install a C++ compiler and binutils (Debian: apt install g++ binutils)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_cuda_is_one_clear_error(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(build.BuildError, match="has no torch that was built with CUDA"):
        build.build(python)


def test_the_torch_of_the_emulator_is_the_pinned_one():
    assert make_environment.TORCH in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()

"""A command in a process of its own: its output, its end, and that nothing it started stays behind."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from pytest_cudagraph.child_process import last_lines, run_child

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups")

STARTS_ANOTHER = 'sleep 60 & echo started > "$1"; '
"""A shell whose own child holds the other end of the pipe that a test reads."""


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def shell(script, pipe):
    return ["sh", "-c", f'exec 3> "$1"; {STARTS_ANOTHER}{script}', "sh", str(pipe)]


def rest_of(reader):
    """What is left in the pipe when no process holds its other end. An error after ten seconds."""
    found = b""
    while True:
        assert select.select([reader], [], [], 10)[0], "a process still holds the pipe"
        part = os.read(reader, 100)
        if not part:
            return found.decode()
        found += part


@pytest.fixture
def reader(pipe):
    """The reading end of the pipe."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_what_a_process_started_ends_with_it(tmp_path, pipe, reader, script, status):
    assert run_child(shell(script, pipe), log=tmp_path / "log", timeout_s=60) == status
    assert rest_of(reader) == "started\n"


STARTS_A_SESSION = """
import subprocess, sys
from pytest_cudagraph.child_process import end_with_parent
end_with_parent()
pipe = open(sys.argv[1], "w")
subprocess.Popen(["sleep", "60"], stdout=pipe, start_new_session=True)
"""


def test_what_a_process_started_in_a_session_of_its_own_ends_with_it(tmp_path, pipe, reader):
    command = [sys.executable, "-c", STARTS_A_SESSION, str(pipe)]
    assert run_child(command, log=tmp_path / "log", timeout_s=60) == 0
    assert rest_of(reader) == ""


def test_a_process_that_hangs_is_killed_with_what_it_started(tmp_path, pipe, reader):
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(shell("wait", pipe), log=tmp_path / "log", timeout_s=1)
    assert rest_of(reader) in ("started\n", "")


CHILD = """
import signal, subprocess, sys
from pytest_cudagraph.child_process import end_with_parent
end_with_parent()
pipe = open(sys.argv[1], "w")
subprocess.Popen(["sleep", "60"], stdout=pipe)
subprocess.Popen(["sleep", "60"], stdout=pipe, start_new_session=True)
print("child", file=pipe, flush=True)
signal.pause()
"""
PARENT = """
import sys
from pathlib import Path
from pytest_cudagraph.child_process import run_child
run_child([sys.executable, "-c", sys.argv[1], sys.argv[2]], log=Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it_also_if_that_is_killed(tmp_path, pipe):
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(pipe), str(tmp_path / "log")]) as parent:
        with pipe.open() as found:
            assert found.readline() == "child\n"
            parent.kill()
            assert rest_of(found.fileno()) == ""


def test_the_end_of_an_output_is_short_and_printable(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 1_000_000 + b"\n\x1b[31mred\xff\tend" * 20)
    found = last_lines(log)
    assert found == ["?[31mred\ufffd       end"] * 12
    log.write_text("loading\nFatal Python error: Segmentation fault\n\n" + "  File\n" * 50)
    assert last_lines(log) == ["Fatal Python error: Segmentation fault", "", *["  File"] * 10]
    log.write_bytes(b"y" * 1000)
    assert last_lines(log) == ["y" * 300]

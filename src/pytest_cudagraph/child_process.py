"""Processes that this one starts: a command with its output in a file, which ends with this process, and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pytest_cudagraph.foreign import printable

T = TypeVar("T")

PARENT = "PYTEST_CUDAGRAPH_PARENT"
"""The variable that names a descriptor to the process. Its end of file says that the parent has ended."""

STARTED_BY = "PYTEST_CUDAGRAPH_STARTED_BY"
"""The variable that all what a command starts inherits: a name for each :func:`run_child` above it, with commas."""

_SHOWN_LINES = 12
"""From the end of an output, where the reason of a failure stands."""

_MOST_COLUMNS = 300

_ABORT_S = 5.0
"""To print the stacks of all threads."""

_READ_BYTES = 64 * 1024


def run_child(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run a command to its end, and return its exit code: negative for a signal, as in :mod:`subprocess`.

    It leads a process group. Whatever it started and still runs afterwards is killed, also after an interrupt, and also
    in a session of its own. Raises :class:`subprocess.TimeoutExpired` after ``timeout_s``. Before it is killed it
    gets SIGABRT: with Python's fault handler on, its output then says where it hung.
    """
    name = uuid.uuid4().hex
    with log.open("wb") as output, _alive_pipe() as pipe:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={
                **(os.environ if environment is None else environment),
                PARENT: ",".join(map(str, pipe)),
                STARTED_BY: ",".join(filter(None, (os.environ.get(STARTED_BY), name))),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pipe,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _abort(process)
            raise
        finally:
            _end(process, name)


def _abort(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ABORT_S)


def _end(process: subprocess.Popen[bytes], name: str) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    _kill_all_of(name)
    process.wait()


def _kill_all_of(name: str) -> None:
    """Kill the processes of this user that a command called ``name`` started, but not this one."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and name in process.environ().get(STARTED_BY, "").split(","):
                process.kill()


@contextmanager
def _alive_pipe() -> Iterator[tuple[int, ...]]:
    """The reading end of a pipe that closes when this process ends in any way, also by SIGKILL. None on Windows."""
    if os.name != "posix":
        yield ()
        return
    reading, writing = os.pipe()
    try:
        yield (reading,)
    finally:
        os.close(reading)
        os.close(writing)


def end_with_parent() -> None:
    """In a process that :func:`run_child` started: end it, and what it started, when its parent ends."""
    # Removed, so that a process started from here does not take the number for its own.
    descriptor = os.environ.pop(PARENT, "")
    if descriptor:
        name = os.environ.get(STARTED_BY, "").rpartition(",")[2]
        threading.Thread(target=_wait_for_end, args=(int(descriptor), name), daemon=True).start()


def _wait_for_end(descriptor: int, name: str) -> None:
    os.read(descriptor, 1)
    if name:
        _kill_all_of(name)
    if os.getpid() == os.getpgid(0):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def begin_in_forked_child(owner: T, begin: Callable[[T], None]) -> None:
    """Call ``begin(owner)`` in each forked child, as long as ``owner`` exists. Does nothing on systems without fork."""
    if hasattr(os, "register_at_fork"):
        reference = weakref.ref(owner)

        def after_in_child() -> None:
            still = reference()
            if still is not None:
                begin(still)

        os.register_at_fork(after_in_child=after_in_child)


def last_lines(log: Path) -> list[str]:
    """The last lines of an output, fit for a message. Of a crash those from Python's fault handler on.

    It prints the latest call first.
    """
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - _READ_BYTES))
        text = output.read().decode("utf-8", errors="replace")
    lines = text.splitlines()
    crashes = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    shown = _crash_lines(lines[crashes[-1] :]) if crashes else lines[-_SHOWN_LINES:]
    return list(map(shown_line, shown))


def shown_line(line: str) -> str:
    """A line of an output, fit for a message."""
    return printable(line.expandtabs())[:_MOST_COLUMNS]


def _crash_lines(lines: list[str]) -> list[str]:
    """The crash and the thread that got the signal. The others stand before it."""
    current = next((at for at, line in enumerate(lines) if line.startswith("Current thread")), 1)
    return [lines[0], *lines[current:]][:_SHOWN_LINES]

"""The limit stops what runs, whatever it is, and leaves the process's one timer to whoever had armed it."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch

from pytest_cudagraph.compile.time_limit import Deadline, stopped_at
from pytest_cudagraph.errors import CompileTimeout

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a POSIX interval timer")


class OtherAlarm(Exception):
    pass


@pytest.fixture
def blocked():
    """Something that would never end by itself."""
    read, write = os.pipe()
    yield lambda: os.read(read, 1)
    os.close(read)
    os.close(write)


@pytest.fixture
def swallowing(blocked):
    """A compiler that turns every exception into its own."""

    def compile_here():
        try:
            blocked()
        except BaseException as exc:
            raise RuntimeError("backend failed") from exc

    return compile_here


@pytest.fixture
def other_alarm():
    """Arm the timer as another plugin would; gives the times it rang."""
    rung = []

    def arm(after_s, interval_s=0.0, raises=False):
        def ring(number, frame):
            rung.append(time.monotonic())
            if raises:
                raise OtherAlarm

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, after_s, interval_s)
        return ring

    arm.rung = rung
    before = signal.getsignal(signal.SIGALRM)
    delay = signal.setitimer(signal.ITIMER_REAL, 0)
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *delay)


def test_what_blocks_is_stopped_at_the_limit(blocked):
    with pytest.raises(CompileTimeout) as raised, stopped_at(Deadline(0.05), "inductor", 8):
        blocked()
    found = str(raised.value)
    assert found.startswith("compile='inductor' was stopped at batch 8 after ")
    assert found.endswith(
        ": the limit for all batch sizes of a model together is 50 ms\n"
        "  to try: fewer batch sizes, a larger time limit, or compile='none'"
    )


def test_a_compiler_that_wraps_every_exception_is_stopped_too(swallowing):
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.05), "inductor", 8):
        swallowing()


def test_what_ends_in_time_is_left_alone():
    before = signal.getsignal(signal.SIGALRM)
    with stopped_at(Deadline(60.0), "inductor", 8):
        pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_error_in_time_stays_that_error():
    with pytest.raises(ValueError, match="mine"), stopped_at(Deadline(60.0), "inductor", 8):
        raise ValueError("mine")


def test_a_user_who_interrupts_is_obeyed(blocked):
    def interrupted():
        try:
            blocked()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), stopped_at(Deadline(0.05), "inductor", 8):
        interrupted()


def test_a_longer_alarm_of_another_plugin_is_armed_again(other_alarm):
    ring = other_alarm(50.0, 7.0)
    with stopped_at(Deadline(60.0), "inductor", 8):
        pass
    assert signal.getsignal(signal.SIGALRM) is ring
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert 40.0 < left_s <= 50.0
    assert interval_s == 7.0


def test_a_longer_alarm_survives_our_own(other_alarm, blocked):
    ring = other_alarm(50.0)
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.05), "inductor", 8):
        blocked()
    assert signal.getsignal(signal.SIGALRM) is ring
    assert 40.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 50.0
    assert other_alarm.rung == []


def test_a_shorter_alarm_of_another_plugin_rings_first(other_alarm, blocked):
    other_alarm(0.05, raises=True)
    with pytest.raises(OtherAlarm), stopped_at(Deadline(60.0), "inductor", 8):
        blocked()
    assert len(other_alarm.rung) == 1


def test_a_shorter_alarm_whose_exception_is_swallowed_does_not_end_our_limit(other_alarm, blocked):
    def deaf():
        with contextlib.suppress(OtherAlarm):
            blocked()
        blocked()

    other_alarm(0.02, raises=True)
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.2), "inductor", 8):
        deaf()
    assert len(other_alarm.rung) == 1


def test_a_shorter_alarm_that_only_looks_does_not_end_our_limit(other_alarm, blocked):
    other_alarm(0.02, 0.02)
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.2), "inductor", 8):
        blocked()
    assert len(other_alarm.rung) >= 2


@pytest.fixture
def start(tmp_path):
    """Start a process of this name that never ends by itself."""
    started = []

    def start(name):
        program = shutil.copy(shutil.which("cat"), tmp_path / name)
        started.append(subprocess.Popen([program], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_compilers_started_meanwhile_are_killed_and_others_are_not(start):
    meanwhile = []

    def compile_here():
        meanwhile.extend((start("user_tool"), start("x86_64-linux-gnu-g++-12")))
        meanwhile[0].wait()

    older = start("cc1plus")
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.5), "inductor", 8):
        compile_here()
    bystander, compiler = meanwhile
    assert compiler.wait() == -signal.SIGKILL
    assert (older.poll(), bystander.poll()) == (None, None)


def test_off_the_main_thread_the_limit_is_looked_at_afterwards(other_alarm):
    ring = other_alarm(50.0)
    raised = []

    def compile_here():
        try:
            with stopped_at(Deadline(0.0), "inductor", 8):
                pass
        except CompileTimeout as exc:
            raised.append(exc)

    thread = threading.Thread(target=compile_here)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert signal.getsignal(signal.SIGALRM) is ring


def test_a_killed_pool_of_compile_workers_is_forgotten(blocked, monkeypatch):
    from torch._inductor import async_compile

    forgotten = []
    monkeypatch.setattr(async_compile, "shutdown_compile_workers", lambda: forgotten.append(True))
    with pytest.raises(CompileTimeout), stopped_at(Deadline(0.05), "inductor", 8):
        blocked()
    assert forgotten == [True]
    with stopped_at(Deadline(60.0), "inductor", 8):
        pass
    assert forgotten == [True]


def test_a_mode_that_was_being_entered_when_the_alarm_rang_does_not_come_back_later():
    def interrupted():
        # What an alarm leaves that rings inside torch.inference_mode's own __enter__, kept by a cycle.
        held = [torch.inference_mode(False)]
        held.append(held)
        held[0].__enter__()
        while True:
            pass

    with torch.inference_mode():
        with pytest.raises(CompileTimeout), stopped_at(Deadline(0.05), "inductor", 2):
            interrupted()
        assert torch.is_inference_mode_enabled()
    gc.collect()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()

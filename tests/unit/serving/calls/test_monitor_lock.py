"""Threads, signal handlers and interrupts that meet a count leave the monitor whole, and nobody waits for ever."""

import dis
import itertools
import sys
import threading

import pytest
from tests.fake_clock import FakeClock

from pytest_cudagraph import CallMonitor
from pytest_cudagraph.serving.calls.call_summary import CallTotals


@pytest.fixture
def monitor():
    return CallMonitor(clock=FakeClock())


def test_a_call_while_another_thread_counts_waits_for_nothing_and_is_not_lost(monitor):
    is_counting, may_end = threading.Event(), threading.Event()

    def count():
        monitor._counted(lambda: (is_counting.set(), may_end.wait(60)))

    other = threading.Thread(target=count)
    other.start()
    assert is_counting.wait(60)
    for _ in range(200):
        with monitor.measure("decode"):
            pass
    may_end.set()
    other.join()
    assert monitor.summary()["decode"].calls == 200


@pytest.mark.parametrize("handler", ["openmetrics", "summary", "records", "clear", "entries"])
def test_a_signal_handler_may_read_and_clear_while_its_thread_counts(monitor, monkeypatch, handler):
    count = CallTotals.add

    def signalled(totals, record, epoch_ns):
        count(totals, record, epoch_ns)
        monkeypatch.setattr(CallTotals, "add", count)
        getattr(monitor, handler)()

    monkeypatch.setattr(CallTotals, "add", signalled)
    for _ in range(50):
        with monitor.measure("decode"):
            pass
    counting = threading.Thread(target=monitor.summary, daemon=True)
    counting.start()
    counting.join(10)
    assert not counting.is_alive()
    with monitor.measure("decode"):
        pass
    assert monitor.summary()["decode"].calls == (1 if handler == "clear" else 51)


def test_an_interrupt_while_calls_are_counted_loses_one_call_at_most(monitor, monkeypatch):
    count, counted = CallTotals.add, []

    def interrupted(totals, record, epoch_ns):
        counted.append(record)
        if len(counted) == 30:
            raise KeyboardInterrupt
        count(totals, record, epoch_ns)

    monkeypatch.setattr(CallTotals, "add", interrupted)
    for _ in range(50):
        with monitor.measure("decode"):
            pass
    with pytest.raises(KeyboardInterrupt):
        monitor.summary()
    assert monitor.summary()["decode"].calls == 49


def interrupt_at(code, offset, call):
    """Run ``call`` and raise before the instruction at this offset of the function."""

    def trace(frame, event, _):
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == offset:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


AFTER_CALLS = [
    (function.__code__, later.offset)
    for function in (CallMonitor.add, CallMonitor._counted)
    for earlier, later in itertools.pairwise(dis.get_instructions(function))
    if earlier.opname.startswith("CALL")
]
"""Where Python runs a signal handler."""


def test_an_interrupt_after_any_call_leaves_the_monitor_usable():
    record, interrupts = ("decode", 0, 1, 0, None, "", None, False), 0
    for code, offset in AFTER_CALLS:
        monitor = CallMonitor()
        monitor._pending.extend([record] * 63)
        try:
            interrupt_at(code, offset, lambda: monitor.add(record))  # noqa: B023
        except KeyboardInterrupt:
            interrupts += 1
        other = threading.Thread(target=monitor.records, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
        assert not monitor._counting.locked()
        assert monitor.summary()["decode"].calls == 64
    assert interrupts >= 5

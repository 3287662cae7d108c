"""What a recorded call costs above the same call without a monitor, and that eight threads lose no call.

All arms are timed in every round, in random order. The figures are medians over the rounds, of differences to the empty
call of the same round. Exits 1 when a limit is exceeded or a call is lost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable

from pytest_cudagraph import CallMonitor

LIMIT_US = 5.0
LIMIT_DISABLED_US = 0.2
CALLS = 128
"""Two times the 64 calls that are counted at once: a round has its share. Longer rounds would time other processes."""
THREADS = 8
CALLS_PER_THREAD = 20_000


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=1500)
    rounds = arguments.parse_args().rounds
    arms = _arms()
    spent_us = _measure(arms, rounds)
    empty_us = statistics.median(spent_us["empty call"])
    print(f"an empty call takes {empty_us:.3f} µs; above it, per call, median of {rounds} rounds:")
    is_slow = False
    for name, (_, limit_us) in arms.items():
        if name == "empty call":
            continue
        above_us = statistics.median(a - b for a, b in zip(spent_us[name], spent_us["empty call"], strict=True))
        is_slow |= above_us > limit_us
        print(f"  {name:<34} {above_us:6.3f} µs, {1 + above_us / empty_us:5.1f}x an empty call, limit {limit_us} µs")
    lost = _lost_by_threads()
    print(f"{THREADS} threads, {CALLS_PER_THREAD} calls each: {lost} lost")
    return int(is_slow or lost != 0)


def _nothing() -> None:
    pass


def _arms() -> dict[str, tuple[Callable[[], object], float]]:
    on, off = CallMonitor(), CallMonitor()
    off.disable()

    def measured(monitor: CallMonitor = on) -> None:
        with monitor.measure("decode", tokens=8, batch_size=8):
            pass

    return {
        "empty call": (_nothing, 0.0),
        "decorator": (on.watch("plain")(_nothing), LIMIT_US),
        "decorator with tokens and batch": (on.watch("counted", tokens=8, batch_size=lambda: 8)(_nothing), LIMIT_US),
        "context manager": (measured, LIMIT_US),
        "decorator, disabled": (off.watch("plain")(_nothing), LIMIT_DISABLED_US),
        "context manager, disabled": (lambda: measured(off), LIMIT_DISABLED_US),
    }


def _measure(arms: dict[str, tuple[Callable[[], object], float]], rounds: int) -> dict[str, list[float]]:
    order = random.Random(0)
    spent_us: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        names = list(arms)
        order.shuffle(names)
        for name in names:
            spent_us[name].append(_spent_us(arms[name][0]))
    return spent_us


def _spent_us(call: Callable[[], object]) -> float:
    begin_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begin_ns) / CALLS / 1e3


def _lost_by_threads() -> int:
    monitor, start = CallMonitor(), threading.Barrier(THREADS)

    def work() -> None:
        start.wait()
        for _ in range(CALLS_PER_THREAD):
            with monitor.measure("decode", tokens=1):
                pass

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = monitor.summary()["decode"]
    return THREADS * CALLS_PER_THREAD - min(summary.calls, summary.tokens)


if __name__ == "__main__":
    sys.exit(main())

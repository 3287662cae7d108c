"""What a baseline of 10,000 entries costs: CPU seconds to read and compare it, and to update it.

Each entry is one test at one batch size, with eager, compiled and replay and one session. Reading and
comparing is what every run does. Updating adds a session to every entry: read the file again under the lock, merge,
write. Each figure is the median of five. Exits 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pytest_cudagraph import record
from pytest_cudagraph.baseline import JsonStore
from pytest_cudagraph.values import DeviceInfo, Interval, Latency, SavedBatch, Session

READ_LIMIT_S, UPDATE_LIMIT_S = 1.0, 2.0
RUNS = 5
BATCH_SIZES = (1, 2, 4, 8)
SESSIONS = 1

DEVICE = DeviceInfo(
    kind="cuda", name="NVIDIA H200", driver="580.159", cuda="13.0", torch="2.13.0", python="3.11.2",
    host_cpu="Intel(R) Xeon(R) Platinum 8481C", platform="Linux-6.8-x86_64", threads=16,
)  # fmt: skip
KERNELS = {"aten.addmm": 12, "aten.layer_norm": 4, "aten.mul": 18, "aten.relu": 8, "aten.softmax": 4}


def entries(count: int, rng: random.Random) -> Iterator[SavedBatch]:
    for number in range(count):
        test, batch_size = number // len(BATCH_SIZES), BATCH_SIZES[number % len(BATCH_SIZES)]
        replay = latency(rng.uniform(20e3, 900e3))
        yield SavedBatch(
            name=f"tests/models/test_{test // 50:03}.py::test_model[layers-{test % 50}]",
            batch_size=batch_size,
            eager=latency(replay.median_ns * 2.5),
            compiled=latency(replay.median_ns * 1.4),
            replay=replay,
            speedup=Interval(estimate=2.5, low=2.4, high=2.6),
            kernels=sum(KERNELS.values()),
            kernel_names=KERNELS,
            device=DEVICE,
            saved_at="2026-11-20T09:00:00+00:00",
            sessions=tuple(session(replay.median_ns, day, rng) for day in range(1, SESSIONS + 1)),
        )


def latency(median_ns: float) -> Latency:
    return Latency(
        samples=400,
        minimum_ns=median_ns * 0.96,
        q25_ns=median_ns * 0.99,
        median_ns=median_ns,
        q75_ns=median_ns * 1.02,
        q90_ns=median_ns * 1.05,
    )


def session(median_ns: float, day: int, rng: random.Random) -> Session:
    median_ns *= rng.gauss(1.0, 0.004)
    return Session(
        date=f"2026-11-{day:02}", commit=f"{day:07x}", software=DEVICE.software,
        q25_ns=median_ns * 0.99, median_ns=median_ns, reference_q25_ns=148e3, reference_median_ns=150e3,
    )  # fmt: skip


def cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def figures(count: int, folder: Path) -> tuple[float, float]:
    """Median CPU seconds to read and compare, and to update."""
    rng, store = random.Random(7), JsonStore(folder, DEVICE)
    saved = list(entries(count, rng))
    found = {(each.name, each.batch_size): again(each, 6, rng) for each in saved}
    read_s, update_s = [], []
    for _ in range(RUNS):
        store.path.unlink(missing_ok=True)
        store.merge(saved, commit_info={})
        read_s.append(cpu_s(lambda: record.compare(store.load(), found, max_slowdown=0.10)))
        update_s.append(cpu_s(lambda: store.merge(found.values(), commit_info={}, continues=True)))
    return statistics.median(read_s), statistics.median(update_s)


def again(entry: SavedBatch, day: int, rng: random.Random) -> SavedBatch:
    """What a run of unchanged code finds of it."""
    return replace(entry, sessions=(session(entry.replay.median_ns, day, rng),))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--entries", type=int, default=10_000)
    count = arguments.parse_args().entries
    with tempfile.TemporaryDirectory() as folder:
        read_s, update_s = figures(count, Path(folder))
        (file,) = Path(folder).glob("*.json")
        megabytes = file.stat().st_size / 1e6
    print(f"{count} entries, {megabytes:.0f} MB: read and compare {read_s:.2f} s of CPU, update {update_s:.2f} s")
    return int(read_s > READ_LIMIT_S or update_s > UPDATE_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

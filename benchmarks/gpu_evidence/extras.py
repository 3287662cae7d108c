"""What is measured besides the cells: kernel time, the call's own cost, the gate's verdicts, raw traces."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu_evidence.arms import NotAvailable, Workplace, make_arm
from benchmarks.gpu_evidence.cells import Cell, Lab
from benchmarks.gpu_evidence.loop import interleave, latency
from benchmarks.models.definitions import build

from pytest_cudagraph import measure, stats
from pytest_cudagraph.measure import Arms, Bounds, PerfCounterClock
from pytest_cudagraph.measure.timer import Timer
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import to_ns, to_seconds

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
TRACE_ROW = np.dtype([("a", "<i8"), ("b", "<i8"), ("bfirst", "i1"), ("t0", "<i8")])
"""One adjacent pair: both samples in ns, whether b came first, and the start since the trace began."""

_PROFILED_CALLS = 5
_QUEUED_REPLAYS = 50
_VERDICT_BUDGET_S = 10.0
_NAMED = 5
"""Disturbances of a GPU that are told in words."""

Call = Callable[[], Any]


def opened(lab: Lab, cell: Cell) -> Any:
    """The workplace of a cell, without measuring it."""
    torch.manual_seed(lab.seed)
    return Workplace.opened(
        lab.backend,
        build(cell.model, lab.scale, cell.batch_size),
        cell.batch_size,
        cache_folder=lab.cache_folder,
        compile_limit_s=lab.compile_share_s,
    )


def kernel_time(lab: Lab, cell: Cell) -> dict[str, Any]:
    """How long the device is busy per call, by the profiler: no latency can be below the replay's."""
    if lab.backend.kind != "cuda":
        raise NotAvailable(f"not available on {lab.backend.kind}")
    with opened(lab, cell) as at, lab.backend.running():
        calls = {name: make_arm(name, at) for name in ("eager", "replay")}
        rewinder = at.rewinder()
        rewind = rewinder or (lambda: None)
        rewind()
        busy = {name: _profiled(call, rewind, lab.backend.synchronize) for name, call in calls.items()}
        rewind()
        return {
            "model": cell.model,
            "batch_size": cell.batch_size,
            **busy,
            # A cache replayed again and again without rewinding runs over, which no process survives.
            "back_to_back_ns": None if rewinder else _back_to_back(lab, at),
        }


def _profiled(call: Call, rewind: Call, synchronize: Call) -> dict[str, Any]:
    """Per call: ns of kernels, copies and fills, and how many of them."""
    for _ in range(2):
        call()
        rewind()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(_PROFILED_CALLS):
            call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        return busy_of(path, _PROFILED_CALLS)


def busy_of(trace_file: Path, calls: int) -> dict[str, Any]:
    """From a Chrome trace (times in µs) of so many calls. Raises :class:`RuntimeError` when it shows no work."""
    events = json.loads(trace_file.read_text(encoding="utf-8"))["traceEvents"]
    spent_us = [float(event["dur"]) for event in events if event.get("cat") in WORK]
    if not spent_us:
        raise RuntimeError("the profiler saw no work of the device")
    return {"busy_ns": round(1e3 * sum(spent_us) / calls, 1), "works": len(spent_us) / calls}


def _back_to_back(lab: Lab, at: Workplace) -> float:
    """ns per replay when many are queued at once: the device's own pace, without the profiler."""
    replay = at.graphs["replay"].replay
    samples_ns = []
    for _ in range(5):
        lab.backend.synchronize()
        begin_ns = time.perf_counter_ns()
        for _ in range(_QUEUED_REPLAYS):
            replay()
        lab.backend.synchronize()
        samples_ns.append((time.perf_counter_ns() - begin_ns) / _QUEUED_REPLAYS)
    return round(summaries.median(samples_ns), 1)


def call_overhead(lab: Lab, cell: Cell, budget_s: float) -> dict[str, Any]:
    """What our call costs above a bare copy and launch, in pairs of one loop; the goal is 3 µs at most."""
    with opened(lab, cell) as at, lab.backend.running():
        call = make_arm("replay", at)
        bare = _bare_call(lab, at)
        readings = interleave(
            {"bare": bare, "call": call},
            budget_s=budget_s,
            synchronize=lab.backend.synchronize,
            seed=lab.seed,
            pair=("call", "bare"),
        )
        differences_ns = [
            one - other for one, other in zip(readings.samples_ns["call"], readings.samples_ns["bare"], strict=True)
        ]
        return {
            "model": cell.model,
            "batch_size": cell.batch_size,
            **{name: latency(samples_ns) for name, samples_ns in readings.samples_ns.items()},
            "difference_ns": {
                name: round(summaries.quantile(differences_ns, fraction), 1)
                for name, fraction in (("q25", 0.25), ("median", 0.5), ("q75", 0.75))
            },
        }


def _bare_call(lab: Lab, at: Workplace) -> Call:
    graph: Any = at.graphs["replay"]
    (given,) = at.subject.args
    if lab.backend.kind == "cuda":
        (static,), launch = graph._inputs.tensors, graph._graph.replay
    else:
        static, launch = given.clone(), graph.replay

    def bare() -> None:
        static.copy_(given)
        launch()

    return bare


def monitor_cost(lab: Lab, cell: Cell, budget_s: float) -> dict[str, Any]:
    """What one reading of the monitor takes, and what it leaves behind: a replay right after one, and one without."""
    with opened(lab, cell) as at, lab.backend.running(), PerfMonitor() as watch:
        replay = make_arm("replay", at)
        timer = Timer(
            calls={"replay": replay},
            clock=PerfCounterClock(),
            synchronize=lab.backend.synchronize,
            bounds=Bounds.of_budget(to_ns(budget_s)),
        )
        readings_ns: list[float] = []
        samples_ns: dict[bool, list[float]] = {False: [], True: []}
        coin = random.Random(lab.seed)
        while timer.elapsed_ns < timer.bounds.extended_ns or not readings_ns:
            for is_after in coin.sample((False, True), 2):
                timer.sample_ns("replay")  # whichever came before, a replay stands between
                if is_after:
                    began_ns = timer.elapsed_ns
                    watch.check()
                    readings_ns.append(timer.elapsed_ns - began_ns)
                samples_ns[is_after].append(timer.sample_ns("replay"))
    return {
        "model": cell.model,
        "batch_size": cell.batch_size,
        "reading": latency(readings_ns),
        "replay": latency(samples_ns[False]),
        "replay_after_reading": latency(samples_ns[True]),
    }


def verdict_time(lab: Lab, cell: Cell, target_ratio: float) -> dict[str, Any]:
    """How long the gate takes to decide on a real model."""
    with opened(lab, cell) as at, lab.backend.running():
        eager, replay = make_arm("eager", at), make_arm("replay", at)
        rewind = at.rewinder()
        at.before.restore()
        timing = _timed(lab, eager, replay, target_ratio, rewind, _VERDICT_BUDGET_S, lab.seed)
        return {
            "model": cell.model,
            "batch_size": cell.batch_size,
            "target_ratio": target_ratio,
            "decision": timing.decision,
            "seconds": round(to_seconds(timing.measure_ns), 3),
            "blocks": timing.blocks,
            "discarded": timing.discarded,
            "disturbance": timing.disturbance,
            "noise_ratio": round(timing.noise_ratio, 5),
            "speedup": round(timing.speedup.estimate, 4),
        }


def false_alarms(lab: Lab, cell: Cell, runs: int, at_most_s: float) -> dict[str, Any]:
    """A/A: one graph against itself at a target of 1.0, which is met; each ``fail`` is a false alarm."""
    decisions: dict[str, int] = {"pass": 0, "fail": 0, "open": 0}
    discarded, disturbances = 0, dict[str, None]()
    seconds: list[float] = []
    estimates: list[float] = []
    with opened(lab, cell) as at, lab.backend.running():
        replay = make_arm("replay", at)
        until_s = time.perf_counter() + at_most_s
        with _small_heap():
            for run in range(runs):
                if seconds and time.perf_counter() > until_s:
                    break
                timing = _timed(lab, replay, replay, 1.0, None, 1.0, run)
                decisions[timing.decision] += 1
                discarded += timing.discarded
                disturbances |= {timing.disturbance: None} if timing.disturbance else {}
                seconds.append(to_seconds(timing.measure_ns))
                estimates.append(timing.speedup.estimate)
    return {
        "model": cell.model,
        "batch_size": cell.batch_size,
        "runs": len(seconds),
        "decisions": decisions,
        "discarded": discarded,
        "disturbances": list(disturbances)[:_NAMED],
        "median_seconds": round(summaries.median(seconds), 3),
        "q90_seconds": round(summaries.quantile(seconds, 0.9), 3),
        "longest_seconds": round(max(seconds), 3),
        "estimate_low": round(min(estimates), 4),
        "estimate_high": round(max(estimates), 4),
    }


@contextmanager
def _small_heap() -> Iterator[None]:
    """Each measurement collects garbage first; of a heap with torch in it that takes longer than the measurement."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _timed(
    lab: Lab, eager: Call, replay: Call, target_ratio: float, rewind: Call | None, budget_s: float, seed: int
) -> Any:
    """As the plugin measures: on a GPU the monitor vets the blocks."""
    with PerfMonitor() as watch:
        return measure.measure_arms(
            Arms(eager=eager, replay=replay),
            clock=PerfCounterClock(),
            rule=stats.EvidenceRule(target_ratio),
            bounds=Bounds.of_budget(to_ns(budget_s)),
            seed=seed,
            synchronize=lab.backend.synchronize,
            prepare=rewind,
            disturbance=watch.check if lab.backend.kind == "cuda" else None,
        )


def trace(lab: Lab, a: Call, b: Call, *, seconds: float, rows: int) -> np.ndarray[Any, Any]:
    """Adjacent pairs in quads abba or baab, each by a fresh coin: the raw material for judging stopping rules."""
    synchronize, now_ns, coin = lab.backend.synchronize, time.perf_counter_ns, random.Random(lab.seed)

    def sample_ns(call: Call) -> int:
        synchronize()
        begin_ns = now_ns()
        call()
        synchronize()
        return now_ns() - begin_ns

    for call in (a, b) * 20:
        sample_ns(call)
    found: list[tuple[int, int, int, int]] = []
    began_ns = now_ns()
    while len(found) < rows and now_ns() - began_ns < to_ns(seconds):
        first = coin.random() < 0.5
        for b_first in (first, not first):
            at_ns = now_ns() - began_ns
            times_ns = {call_name: sample_ns(b if call_name else a) for call_name in (b_first, not b_first)}
            found.append((times_ns[False], times_ns[True], int(b_first), at_ns))
    return np.array(found, dtype=TRACE_ROW)


def traces(lab: Lab, cells: Mapping[str, tuple[Cell, str, str]], seconds: float, rows: int, folder: Path) -> list[str]:
    """Write one trace per entry (a cell and its arms a and b); their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (cell, first, second) in cells.items():
        with opened(lab, cell) as at, lab.backend.running():
            arms = {arm: make_arm(arm, at) for arm in {first, second}}
            np.save(folder / f"{name}.npy", trace(lab, arms[first], arms[second], seconds=seconds, rows=rows))
        written.append(f"{folder.name}/{name}.npy")
    return written

"""What the story costs beside compiling and measuring, and what a replay of the twin costs beside a bare loop.

Two figures on the CPU twin, one thread:

- audit, capture, check, gate, record and report of an MLP at four batch sizes, median of several runs; limit 0.5 s;
- one replay against a bare Python loop that calls the recorded operations: the operators a dispatch mode sees in one
  call of the model, with their arguments, results thrown away. Both alternate in random order in blocks of a
  millisecond; the figure is the ratio of the lower quartiles; limit 1.1.

Exits 1 when a limit is broken. With ``--calls`` it prints what each stage of a rehearsal at four batch sizes takes, in
eager calls of the mean size, of a small and of a large model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph import pipeline
from pytest_cudagraph.settings.case import CallSettings, ModelCall, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS
from pytest_cudagraph.summary import CollectedTests, end_run

STORY_LIMIT_S = 0.5
REPLAY_LIMIT_RATIO = 1.1


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


def settings_for(folder: Path) -> Settings:
    defaults = {option.setting: option.default for option in OPTIONS}
    asked = {
        "enabled": True,
        "device": "cpu",
        "update": "all",
        "baseline": str(folder),
        "json": str(folder / "run.json"),
    }
    return Settings(**{**defaults, **asked}, rootdir=folder)


class WideEncoder(nn.Module):
    """Two layers of a transformer on 256 tokens: calls of tens of milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(768, 12, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "mlp": (make_mlp, lambda: torch.randn(1, 64)),
    "encoder": (lambda: WideEncoder().eval(), lambda: torch.randn(1, 256, 768)),
}


def calls_per_stage(folder: Path, name: str) -> dict[str, float]:
    """The time of each stage of a rehearsal at 1, 2, 4 and 8, divided by the time of one eager call at each size."""
    make, example = MODELS[name]
    model, x = make(), example()
    settings = replace(settings_for(folder), device="auto")
    case = make_case(f"test_{name}.py::test_{name}", CallSettings(), MarkSettings(), settings)
    device_context = replace(
        pipeline.open_device_context("cpu", settings), why_not_judged="rehearsal: the benchmark counts calls"
    )
    call = ModelCall(model=model, args=(x,))
    with pipeline.ModelRun(
        case=case,
        device_context=device_context,
        model=pipeline.prepare_model(call, case, device_context.backend),
        cache_folder=lambda: folder,
        compile_timeout_s=60,
        progress=lambda line: None,
    ) as run:
        spent = {stage.__name__: _seconds(partial(run.run, stage)) for stage in _stages(run)}
    with torch.inference_mode():
        batches = [torch.cat([x] * size) for size in case.batch_sizes]
        for batch in batches:
            model(batch)
        eager_s = sum(min(_seconds(partial(model, batch)) for _ in range(5)) for batch in batches) / len(batches)
    return {stage: seconds / eager_s for stage, seconds in spent.items()} | {"eager_ms": 1000 * eager_s}


def _stages(run: pipeline.ModelRun) -> list[Callable[[], None]]:
    return [run.run_eager, run.audit, run.compile, run.capture, run.check, run.measure]


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def story_s(folder: Path) -> float:
    """Seconds of one story without its measuring: the time of the measure stage is taken off."""
    settings = settings_for(folder)
    case = make_case("test_mlp.py::test_mlp", CallSettings(), MarkSettings(time_budget=0.05), settings)
    device_context = pipeline.open_device_context("cpu", settings)
    begin = time.perf_counter()
    call = ModelCall(model=make_mlp(), args=(torch.randn(1, 64),))
    with pipeline.ModelRun(
        case=case,
        device_context=device_context,
        model=pipeline.prepare_model(call, case, device_context.backend),
        cache_folder=lambda: folder,
        compile_timeout_s=60,
        progress=lambda line: None,
    ) as run:
        report = pipeline.run_stages(run)
    collected = CollectedTests(passed=frozenset([case.nodeid]), finished=True, complete=True, paths=(".",))
    end_run([report], collected, settings)
    spent = time.perf_counter() - begin
    return spent - sum(batch.timing.measure_ns for batch in report.batches if batch.timing) / 1e9


class Operations(TorchDispatchMode):
    """The operators of one call, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def replay_ratio(batch_size: int, blocks: int) -> float:
    """Lower quartile of a replay over that of a bare loop of the recorded operations."""
    backend = pipeline.open_device_context("cpu", settings_for(Path())).backend
    model, x = make_mlp(), torch.randn(batch_size, 64)
    with backend.running(), Operations() as operations:
        model(x)
    calls = operations.calls

    def bare() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)

    with backend.pool() as pool:
        graph = pool.capture(model, (x,), {}, batch_size=batch_size)
        with backend.running():
            return _interleaved_ratio(graph.replay, bare, blocks)


def _interleaved_ratio(first: Callable[[], Any], second: Callable[[], Any], blocks: int) -> float:
    order, samples = random.Random(0), {first: [], second: []}
    for call in samples:
        _block_ns(call)
    for _ in range(blocks):
        for call in order.sample([first, second], 2):
            samples[call].append(_block_ns(call))
    quartiles = [statistics.quantiles(samples[call], n=4)[0] for call in (first, second)]
    return quartiles[0] / quartiles[1]


def _block_ns(call: Callable[[], Any], calls: int = 50) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls


def _print_calls() -> int:
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            worth = calls_per_stage(Path(folder), name)
        eager_ms = worth.pop("eager_ms")
        stages = ", ".join(f"{stage} {calls:.0f}" for stage, calls in worth.items())
        print(f"{name}, mean eager call {eager_ms:.3f} ms: {sum(worth.values()):.0f} eager calls' worth ({stages})")
    return 0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--blocks", type=int, default=400)
    arguments.add_argument("--calls", action="store_true", help="only print the eager calls' worth of each stage")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    if asked.calls:
        return _print_calls()
    with tempfile.TemporaryDirectory() as folder:
        seconds = [story_s(Path(folder)) for _ in range(asked.runs)]
    median_s = statistics.median(seconds)
    print(f"story without compile and measure, MLP at 1, 2, 4, 8: {median_s:.3f} s (first {seconds[0]:.3f} s)")
    ratios = {size: replay_ratio(size, asked.blocks) for size in (1, 8)}
    for size, ratio in ratios.items():
        print(f"replay at batch {size}: {ratio:.2f}x of a bare loop over the recorded operations")
    return int(median_s > STORY_LIMIT_S or max(ratios.values()) > REPLAY_LIMIT_RATIO)


if __name__ == "__main__":
    sys.exit(main())

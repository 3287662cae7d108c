"""What a served call costs above a bare ``copy_`` of its input and a bare replay, by the number of weights.

    python benchmarks/runner_overhead.py                        on the CPU twin
    python benchmarks/runner_overhead.py --device cuda          on a CUDA device, real or emulated
    python benchmarks/runner_overhead.py --cold                 other data fills the processor's caches before each call
    python benchmarks/runner_overhead.py --against OTHER        another checkout too, in the same rounds
    python benchmarks/runner_overhead.py --price                what watch="hooks" costs the other code of the process

The replay itself is one small layer. The other weights are held by the model and not used, because only their number
matters here. Half of the layers have no bias, as in a language model. Each checkout has a process of its own, and one
of them works at a time. All arms are timed in every round, in random order. The figures are medians over the rounds, of
differences to the bare arm within a round. Exits 1 if a limit is exceeded. There is no limit for cold caches.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRAPH_LIMIT_US, RUNNER_LIMIT_US = 3.0, 10.0
CALLS, COLD_CALLS = 50, 3
COLD_BYTES = 64 << 20
WIDTH = 64
ARMS = ("bare", "graph", "runner", "hooks", "not watched", "not cloned", "padded")
HERE = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", type=int, nargs="+", default=[2, 32, 128, 291])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--cold", action="store_true", help="fill the processor's caches before each call")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--price", action="store_true", help="time what watch='hooks' wraps")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return _work(asked.device, asked.weights, asked.cold)
    if asked.price:
        return _print_price(asked.rounds)
    trees = {"here": HERE, **({"other": asked.against} if asked.against else {})}
    workers = {name: _Worker(tree, asked) for name, tree in trees.items()}
    try:
        return _compare(workers, asked)
    finally:
        for worker in workers.values():
            worker.close()


class _Worker:
    """The models and runners of one checkout, in a process of its own."""

    def __init__(self, tree: Path, asked: argparse.Namespace) -> None:
        weights = [str(count) for count in asked.weights]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--device", asked.device, "--weights", *weights]
            + ["--cold"] * asked.cold,
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def time_us(self, count: int, arm: str) -> float:
        """The time of one call. NaN for what this checkout does not have."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, arm, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def _compare(workers: dict[str, _Worker], asked: argparse.Namespace) -> int:
    order, exceeded = random.Random(0), []
    caches = "cold" if asked.cold else "warm"
    print(f"µs above copy_ and replay, per call, on {asked.device}, {caches}, medians of {asked.rounds} rounds")
    for count in asked.weights:
        spent_us: dict[tuple[str, str], list[float]] = {(tree, arm): [] for tree in workers for arm in ARMS}
        for _ in range(asked.rounds):
            cells = list(spent_us)
            order.shuffle(cells)
            for tree, arm in cells:
                spent_us[tree, arm].append(workers[tree].time_us(count, arm))
        for tree in workers:
            bare_us = spent_us[tree, "bare"]
            above_us = {arm: _median_gap(spent_us[tree, arm], bare_us) for arm in ARMS[1:]}
            texts = [f"{arm} {each:+.1f}" for arm, each in above_us.items() if each == each]
            print(f"  {count} weights, {tree} (bare {statistics.median(bare_us):.1f}): {', '.join(texts)}", flush=True)
            if tree == "here":
                exceeded += [above_us["graph"] > GRAPH_LIMIT_US, above_us["not watched"] > RUNNER_LIMIT_US]
    print(f"limits: graph {GRAPH_LIMIT_US:.0f} µs, runner without its watch {RUNNER_LIMIT_US:.0f} µs")
    return int(any(exceeded) and not asked.cold)


def _median_gap(arm_us: list[float], bare_us: list[float]) -> float:
    return statistics.median(one - other for one, other in zip(arm_us, bare_us, strict=True))


def _work(device: str, counts: list[int], is_cold: bool) -> int:
    import torch

    torch.set_num_threads(1)
    with torch.inference_mode():
        arms = {count: _arms(device, count) for count in counts}
        other = torch.zeros(COLD_BYTES, dtype=torch.uint8)
        for line in sys.stdin:
            count, _, arm = line.strip().partition(" ")
            call = arms[int(count)].get(arm)
            spent_us = _cold_us(call, lambda: other.add_(1)) if call and is_cold else call and _spent_us(call)
            print(spent_us or "nan", flush=True)
            if device == "cuda":
                torch.cuda.synchronize()
    return 0


def _arms(device: str, count: int) -> dict[str, Callable[[], object]]:
    import torch

    from pytest_cudagraph import GraphRunner, InputError
    from pytest_cudagraph.backends import open_backend

    model = _model(count).to(device)
    x, short = torch.randn(4, WIDTH, device=device), torch.randn(3, WIDTH, device=device)
    graph: Any = open_backend(device).pool().capture(model, (x,), {}, batch_size=4)
    buffer = graph._inputs.tensors[0]
    # Torch's own replay. The twin has only its own.
    replay = graph.replay if device == "cpu" else graph._graph.replay
    run, uncloned = (GraphRunner(model, x, batch_sizes=(4,), device=device, clone_outputs=how) for how in (True, False))

    def bare() -> None:
        buffer.copy_(x)
        replay()

    arms: dict[str, Callable[[], object]] = {
        "bare": bare,
        "graph": lambda: graph(x),
        "runner": lambda: run(x),
        "not cloned": lambda: uncloned(x),
        "padded": lambda: run(short),
    }
    for arm, watch in (("not watched", "manual"), ("hooks", "hooks")):
        with contextlib.suppress(TypeError, InputError):  # an older checkout
            other = GraphRunner(model, x, batch_sizes=(4,), device=device, watch=watch)
            arms[arm] = functools.partial(other, x)
    return arms


def _print_price(rounds: int) -> int:
    """With and without the wrappers in turn, in one process."""
    from torch import nn

    from pytest_cudagraph.serving.replacements import Replacements

    layer = nn.Linear(4, 4)
    calls: dict[str, Callable[[], object]] = {
        "read parameter.data": lambda: layer.weight.data,
        "assign a number to an attribute": lambda: setattr(layer, "calls", 1),
    }
    for name, call in calls.items():
        spent_us: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            spent_us["without"].append(_spent_us(call))
            listening = Replacements()
            spent_us["with"].append(_spent_us(call))
            listening.close()
        before_us, after_us = (statistics.median(each) for each in spent_us.values())
        print(f"{name}: {before_us:.2f} -> {after_us:.2f} µs")
    return 0


def _model(count: int) -> Any:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(WIDTH, WIDTH)
            self.unused = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU()) if at % 2 else nn.LayerNorm(8, bias=False)
                for at in range(count - 2)
            )

        def forward(self, x: Any) -> Any:
            return self.used(x)

    return Model().eval()


def _spent_us(call: Callable[[], object]) -> float:
    call()
    begin_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begin_ns) / CALLS / 1e3


def _cold_us(call: Callable[[], object], fill_caches: Callable[[], object]) -> float:
    spent_ns = []
    for _ in range(COLD_CALLS):
        fill_caches()
        begin_ns = time.perf_counter_ns()
        call()
        spent_ns.append(time.perf_counter_ns() - begin_ns)
    return statistics.median(spent_ns) / 1e3


if __name__ == "__main__":
    sys.exit(main())

"""What audit, capture and check of a model cost beside its own calls: how it grows with layers and with bytes.

Each cell runs the product's stages on the CPU twin in a process of its own, with one thread. ``beside`` is the time of
the stages without the eager calls. ``memory`` is what the process needs above the weights. With
``--against TREE``, a checkout of another revision, each cell runs in both trees in turn, and the table shows the ratio.

    python benchmarks/check_cost.py --only resnet18 --rounds 3 --against ../before
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20
STAGES = ("run_eager", "audit", "capture", "check")
LIMIT_BESIDE_S = 20.0
LIMIT_MEMORY_RATIO = 0.10
JUDGED = "1 GiB of weights"
IN_CALLS_NS: list[int] = []
"""The duration of each eager call. A global, because what a model holds is compared and restored."""


class Timed(nn.Sequential):
    """Notes how long its calls take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started_ns = time.perf_counter_ns()
        try:
            return super().forward(x)
        finally:
            IN_CALLS_NS.append(time.perf_counter_ns() - started_ns)


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, as in He et al., "Deep Residual Learning for Image Recognition" (2015)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        is_same = before == after and stride == 1
        shortcut = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(side: int) -> tuple[nn.Module, torch.Tensor]:
    """ResNet-18 with 11.7 million parameters, for square images of this many pixels a side."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        block
        for before, after in itertools.pairwise(widths)
        for block in (BasicBlock(before, after, 1 if after == 64 else 2), BasicBlock(after, after, 1))
    ]
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    return Timed(*stem, *blocks, *head), torch.randn(1, 3, side, side)


def linear_layers(layers: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    """Square linear layers of ``4 * width**2`` bytes each."""
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.ReLU()))
    return Timed(*parts), torch.randn(1, width)


Made = Callable[[], tuple[nn.Module, torch.Tensor]]


def cells() -> Iterator[tuple[str, Made]]:
    """Each by name."""
    yield "resnet18, 32 pixels", lambda: resnet18(32)
    yield "resnet18, 224 pixels", lambda: resnet18(224)
    for layers in (10, 40, 160):
        yield f"{layers} small layers", lambda layers=layers: linear_layers(layers, 64)  # type: ignore[misc]
    for width, shown in ((1024, "16 MiB"), (2048, "64 MiB"), (4096, "256 MiB")):
        yield f"4 layers, {shown}", lambda width=width: linear_layers(4, width)  # type: ignore[misc]
    yield JUDGED, lambda: linear_layers(16, 4096)


def peak_bytes() -> int:
    """The largest resident memory of this process since :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_cell(name: str) -> dict[str, float]:
    """Run the stages of one cell in this process: seconds by stage, in the calls, and MiB above the weights."""
    from pytest_cudagraph import pipeline
    from pytest_cudagraph.backends import open_backend
    from pytest_cudagraph.measure import PerfCounterClock
    from pytest_cudagraph.settings.case import CallSettings, ModelCall, make_case
    from pytest_cudagraph.settings.marks import MarkSettings
    from pytest_cudagraph.settings.options import Settings
    from pytest_cudagraph.settings.registered import OPTIONS
    from pytest_cudagraph.values import DeviceInfo

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, x = dict(cells())[name]()
    model.eval()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    settings = Settings(**{option.setting: option.default for option in OPTIONS})
    case = make_case("benchmark", CallSettings(batch_sizes=(1, 2)), MarkSettings(), settings)
    device: Any = dict.fromkeys(("name", "torch", "python", "host_cpu", "platform"), "")
    context = pipeline.DeviceContext(
        device=DeviceInfo(kind="cpu", driver=None, cuda=None, threads=1, **device),
        backend=open_backend("cpu"),
        clock=PerfCounterClock(),
        saved={},
        elsewhere=(),
        baseline_file=Path(),
        why_not_judged="",
    )
    with torch.inference_mode():
        model(x)  # the first call of a process sets libraries up
    prepared = pipeline.prepare_model(ModelCall(model=model, args=(x,)), case, context.backend)
    run = pipeline.ModelRun(
        case=case,
        device_context=context,
        model=prepared,
        cache_folder=Path,
        compile_timeout_s=60.0,
        progress=lambda line: None,
    )
    found: dict[str, float] = {"weights": weights / MIB}
    IN_CALLS_NS.clear()
    forget_peak()
    before = peak_bytes()
    with run:
        for stage in STAGES:
            started, called = time.perf_counter(), sum(IN_CALLS_NS)
            run.run(getattr(run, stage))
            found[stage] = time.perf_counter() - started
            found[f"{stage} beside"] = found[stage] - (sum(IN_CALLS_NS) - called) / 1e9
        assert not run.has_failed, run.finish()
        replay = run.results.graphs[2].replay
        started = time.perf_counter()
        replay()
        found["replay"] = time.perf_counter() - started
    found["eager"] = statistics.median(IN_CALLS_NS) / 1e9
    found["memory"] = (peak_bytes() - before) / MIB
    return found


def run_in(tree: Path, name: str) -> dict[str, float]:
    """Run one cell in a new process with the source of ``tree``."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--cell", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def row(name: str, found: dict[str, float], before: dict[str, float] | None) -> str:
    """One line of the table."""
    cells = [f"{name:22}", f"{1000 * found['eager']:7.1f}"]
    cells += [f"{found[stage]:7.2f}" for stage in STAGES]
    cells += [f"{sum(found[f'{stage} beside'] for stage in STAGES):7.2f}"]
    cells += [f"{found['memory']:7.0f} of {found['weights']:5.0f}"]
    if before is not None:
        cells.append(f"check {found['check'] / before['check']:.2f} of {before['check']:.2f} s")
        cells.append(f"memory before {before['memory']:.0f}")
    return "  ".join(cells)


def main() -> int:
    """Print the table. 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="a checkout of the revision to compare with")
    given = parser.parse_args()
    if given.cell:
        print(json.dumps(run_cell(given.cell)))
        return 0
    here = Path(__file__).parent.parent
    trees = [here] if given.against is None else [here, given.against]
    print("two batch sizes. Times in s, a call in ms, memory in MiB above the weights")
    print("  ".join([f"{'model':22}", "   call", *(f"{stage:>7.7}" for stage in STAGES), " beside", " memory"]))
    is_over = False
    for name in (name for name, _ in cells() if given.only in name):
        runs: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
        for turn in range(given.rounds):
            for tree in trees[:: -1 if turn % 2 else 1]:
                runs[tree].append(run_in(tree, name))
        found = medians(runs[here])
        print(row(name, found, None if given.against is None else medians(runs[given.against])), flush=True)
        if name == JUDGED:
            beside = sum(found[f"{stage} beside"] for stage in STAGES)
            is_over = beside > LIMIT_BESIDE_S or found["memory"] > LIMIT_MEMORY_RATIO * found["weights"]
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())

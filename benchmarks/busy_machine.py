"""A correct model, timed beside processes that multiply matrices: how often does the plugin fail it?

    python benchmarks/busy_machine.py                       200 runs beside three busy processes
    python benchmarks/busy_machine.py --processes 0         the same at rest: the true speedup
    python benchmarks/busy_machine.py --threads 2           with torch's default threads

Each run is one test of one pytest session: audit, capture, check and measurement of the same model, asked for 1.15x
with a budget of 10 s. Exits 1 if a single one fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

MODEL = """
import pytest
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(224, 224), nn.LayerNorm(224)
    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))

@pytest.mark.graph_speedup(min=1.15)
@pytest.mark.parametrize("run", range({runs}))
def test_run(cudagraph, run):
    cudagraph(nn.Sequential(*(Layer() for _ in range(6))).eval(), torch.randn(1, 224), batch_sizes=(1,))
"""
BUSY = "import torch\na = torch.randn(700, 700)\nwhile True:\n    a @ a\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=3, help="busy processes beside it")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in the measured process")
    parser.add_argument("--time-budget", type=float, default=10.0, help="seconds per run, at most")
    asked = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(asked.processes)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = _rows(Path(folder), asked)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return _tell(rows, asked)


def _rows(folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One pytest session; the rows of its JSON document."""
    (folder / "test_runs.py").write_text(MODEL.format(runs=asked.runs), encoding="utf-8")
    options = (f"--cudagraph-threads={asked.threads}", f"--cudagraph-time-budget={asked.time_budget}")
    command = [sys.executable, "-m", "pytest", "-q", "--cudagraph", "--cudagraph-device=cpu", *options]
    log = folder / "log"
    with log.open("w") as output:
        command += ["--cudagraph-json=run.json", "test_runs.py"]
        subprocess.run(command, cwd=folder, stdout=output, stderr=output)
    document = folder / "run.json"
    if not document.exists():
        sys.exit(log.read_text(encoding="utf-8"))
    tests = json.loads(document.read_text(encoding="utf-8"))["tests"]
    return [batch for test in tests for batch in test["batches"]]


def _tell(rows: list[dict[str, Any]], asked: argparse.Namespace) -> int:
    counts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"{len(rows)} of {asked.runs} runs beside {asked.processes} busy processes: {told}")
    speedups = [row["speedup"]["estimate"] for row in rows if row["speedup"]]
    if speedups:
        print(f"speedup: median {statistics.median(speedups):.2f}x, {min(speedups):.2f} to {max(speedups):.2f}")
    for row in rows:
        if row["verdict"] == "failed":
            print("failed:", row["reason"])
    return int(counts["failed"] > 0 or len(rows) < asked.runs)


if __name__ == "__main__":
    sys.exit(main())

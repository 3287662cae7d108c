"""How often the rankings of workloads order two copies of one model, which are equal.

Each copy is a test of its own, measured one after the other, as in a suite. Run it beside other work to see what the
rule does on a busy machine. Exits 1 if more than 5 % of the pairs are ordered, or if there is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_cudagraph.report import run_of_document
from pytest_cudagraph.report.workloads import WorkloadCell, cells_of

MOST_ORDERED = 0.05

TEST = """
import pytest
import torch
from torch import nn


@pytest.mark.workload(group="copies")
@pytest.mark.graph_speedup(min=0.01, batch_sizes=[1, 8])
@pytest.mark.parametrize("copy", range({copies}))
def test_copy(cudagraph, copy):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    cudagraph(nn.Sequential(*layers).eval(), torch.randn(1, 64))
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--copies", type=int, default=24)
    cells = _measured(arguments.parse_args().copies)
    pairs = [pair for pair in itertools.combinations(cells, 2) if pair[0].key[2:] == pair[1].key[2:]]
    ordered = sum(one.is_faster(other) or other.is_faster(one) for one, other in pairs)
    print(f"{ordered} of {len(pairs)} pairs of equal cells are ordered")
    for (size, way), own in itertools.groupby(sorted(cells, key=_kind), key=_kind):
        medians_us = [cell.session.median_ns / 1e3 for cell in own if cell.session]
        print(f"  batch {size}, {way}: medians from {min(medians_us):.1f} to {max(medians_us):.1f} µs")
    return int(not pairs or ordered > MOST_ORDERED * len(pairs))


def _kind(cell: WorkloadCell) -> tuple[int, str]:
    return cell.batch_size or 0, cell.way


def _measured(copies: int) -> list[WorkloadCell]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_copies.py").write_text(TEST.replace("{copies}", str(copies)), encoding="utf-8")
        options = [
            "--cudagraph",
            "--cudagraph-device=cpu",
            f"--cudagraph-json={folder / 'run.json'}",
            "-p",
            "no:cacheprovider",
        ]
        pytest.main([name, "--rootdir", name, "-q", "--no-header", "--no-summary", *options])
        run = run_of_document(json.loads((folder / "run.json").read_text(encoding="utf-8")))
        found = cells_of(run.reports, run.workloads)
    return [cell for cell in found if cell.session]


if __name__ == "__main__":
    sys.exit(main())

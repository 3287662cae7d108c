"""Measure CUDA graphs on this machine's GPU, and write what was found as evidence.

    python benchmarks/gpu.py                        on a GPU, at most 8 minutes
    python benchmarks/gpu.py --rehearse --out DIR   the whole script on the CPU twin, in tiny; says nothing of a GPU

Writes ``benchmarks/evidence/<device>/<date>-<tree>.json``, anew after every step. Runs from the source tree: nothing of
this project needs to be installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# Finalising the profiler's library under live graphs has crashed processes; nothing here needs it undone.
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import torch  # noqa: E402
from benchmarks import capture_rules  # noqa: E402
from benchmarks.gpu_evidence import evidence, rules, schedule, tree  # noqa: E402
from benchmarks.gpu_evidence.cells import Lab  # noqa: E402
from benchmarks.models.definitions import BATCH_SIZES, MODELS, Scale  # noqa: E402

from pytest_cudagraph import device  # noqa: E402
from pytest_cudagraph.backends import open_backend  # noqa: E402
from pytest_cudagraph.baseline import slug  # noqa: E402
from pytest_cudagraph.monitor import PerfMonitor  # noqa: E402

LIMIT_S = 470.0
REHEARSAL_LIMIT_S = 150.0
PROFILING_S = 80.0
"""Kept for the kernel times, which must come after everything that is timed."""


def main() -> int:
    arguments = _arguments()
    missing = None if arguments.rehearse else device.why_no_gpu()
    if missing is not None:
        print(f"no GPU can be used: {missing.found}; --rehearse runs the script on the CPU twin", file=sys.stderr)
        return 1
    ends_s = time.perf_counter() + arguments.limit
    timed_ends_s = ends_s - (0.0 if arguments.rehearse else PROFILING_S)
    if arguments.rehearse:
        torch.set_num_threads(1)
    path, document = _begin(arguments)
    if not arguments.rehearse:
        _ask_rules(path, document)
    with tempfile.TemporaryDirectory() as cache, PerfMonitor() as watch:
        lab, extent = _plan(arguments, path, Path(cache), timed_ends_s)

        def after_step(line: str) -> None:
            watch.sample()
            evidence.write(path, document)
            print(line, flush=True)

        timed, profiled = schedule.timed(lab, extent), schedule.profiled(lab, extent)
        schedule.run(timed, document, ends_s=timed_ends_s, after_step=after_step)
        schedule.run(profiled, document, ends_s=ends_s, after_step=after_step)
    document["clocks"], document["notes"] = evidence.clocks(watch.card), list(watch.card.notes)
    document["seconds"] = round(arguments.limit - (ends_s - time.perf_counter()), 1)
    document["ended_at"] = _now()
    evidence.write(path, document)
    print(f"{path}: {len(document['cells'])} cells, {len(document['left_out'])} steps left out")
    for line in document["failures"]:
        print(f"failed: {line}")
    return 0


def _ask_rules(path: Path, document: dict[str, Any]) -> None:
    """First, because they decide what the other figures mean."""
    try:
        found = document["rules"] = rules.ask(path.with_name(f"{path.stem}-rules.txt"))
    except RuntimeError as error:
        document["failures"].append(str(error))
        return
    for each in found["differences"]:
        print(capture_rules.difference_text(each))
    print(f"{found['equal']} of {found['asked']} rules of capture are answered as on {found['expected_of']}")
    evidence.write(path, document)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU twin in tiny; needs --out")
    parser.add_argument("--out", type=Path, help="folder of the files; on a GPU benchmarks/evidence by default")
    parser.add_argument("--limit", type=float, help="seconds for the whole run")
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.out is None:
        parser.error("--rehearse needs --out: its figures are no evidence and must not lie among any")
    arguments.out = arguments.out or ROOT / "benchmarks" / "evidence"
    arguments.limit = arguments.limit or (REHEARSAL_LIMIT_S if arguments.rehearse else LIMIT_S)
    return arguments


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _begin(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    described = device.describe("cpu" if arguments.rehearse else "cuda")
    source, began_at = tree.source(ROOT), _now()
    name = f"{began_at[:10]}-{str(source['tree'])[:10]}"
    document: dict[str, Any] = {
        "schema": evidence.SCHEMA,
        "rehearsal": bool(arguments.rehearse),
        "began_at": began_at,
        "ended_at": None,
        "seconds": None,
        "limit_seconds": arguments.limit,
        "source": source,
        "device": asdict(described),
        "versions": evidence.versions(),
        "clocks": [],
        "notes": [],
        "rules": None,
        "cells": [],
        "overhead": None,
        "monitor": None,
        "verdicts": [],
        "false_alarms": None,
        "kernel_time": [],
        "traces": [],
        "left_out": [],
        "failures": [],
    }
    return arguments.out / slug(described) / f"{name}.json", document


def _plan(arguments: argparse.Namespace, path: Path, cache: Path, timed_ends_s: float) -> tuple[Lab, schedule.Extent]:
    tiny = bool(arguments.rehearse)
    backend = open_backend("cpu" if tiny else "cuda")
    lab = Lab(
        backend=backend,
        scale=Scale(tiny=tiny, device=backend.device),
        cache_folder=cache,
        sample_s=0.15 if tiny else 1.2,
        compile_limit_s=40.0 if tiny else 75.0,
        ends_s=timed_ends_s,
    )
    extent = schedule.Extent(
        batch_sizes=(1, 2) if tiny else BATCH_SIZES,
        cell_s=2.0 if tiny else 4.0,
        compiled_cell_s=40.0 if tiny else 60.0,
        overhead_s=0.5 if tiny else 4.0,
        monitor_s=0.2 if tiny else 1.5,
        alarms=4 if tiny else 200,
        alarms_s=3.0 if tiny else 80.0,
        trace_s=0.3 if tiny else 3.0,
        trace_rows=500 if tiny else 18_000,
        folder_of_traces=path.with_name(f"{path.stem}-traces"),
        compiled_models=("classifier",) if tiny else tuple(MODELS),
    )
    return lab, extent


if __name__ == "__main__":
    sys.exit(main())

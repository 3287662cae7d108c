"""Time and bytes of an HTML page of 1,000 tests at four batch sizes, each with ten saved sessions."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.facts import H200, batch, latency, report, saved, sessions, timing

from pytest_cudagraph.report import document, json_text, page, run_of_document
from pytest_cudagraph.values import GraphReport

TESTS, SIZES = 1000, (1, 2, 4, 8)
LIMIT_S, LIMIT_BYTES = 10.0, 5_000_000


def made_up(number: int, draw: random.Random, *, compiled: bool) -> GraphReport:
    batches = []
    for size in SIZES:
        replay_us, ratio = draw.uniform(40, 400), draw.uniform(1.1, 3)
        days = [replay_us * draw.gauss(1, 0.01) for _ in range(10)]
        timed = timing(replay_us * ratio, replay_us, replay_us * 1.2 if compiled else None)
        timed = replace(timed, reference=latency(100.0), busy_ns=replay_us * 900)
        batches.append(batch(size, timing=timed, baseline=saved(sessions=sessions(*days, reference_us=100.0))))
    return report(f"tests/serving/test_models_{number % 20}.py::test_model_{number}[float16]", *batches)


def main() -> int:
    draw, worst = random.Random(1), False
    for compiled in (False, True):
        tests = [made_up(number, draw, compiled=compiled) for number in range(TESTS)]
        found = json.loads(json_text(document(tests, H200, {})))
        begun = time.perf_counter()
        size = len(page(run_of_document(found)).encode())
        spent_s = time.perf_counter() - begun
        print(f"{'with' if compiled else 'without'} compiled code: {spent_s:.1f} s, {size / 1e6:.2f} MB")
        worst |= spent_s > LIMIT_S or size > LIMIT_BYTES
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())

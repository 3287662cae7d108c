"""What the idle plugin costs every pytest run of an environment, beside no plugin and beside pytest-benchmark.

One empty test runs with each of them, in random order in each round. The figure is the CPU time of the process, which
other work on the machine disturbs less than a clock does: the median of the differences in a round, as a share of the
run without a plugin. Exits 1 above the limit, above pytest-benchmark, or when torch was imported.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_RATIO = 0.03
OTHERS = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:xdist.looponfail"]
ARMS = {
    "no plugin": ["-p", "no:cudagraph", "-p", "no:benchmark"],
    "cudagraph": ["-p", "no:benchmark"],
    "pytest-benchmark": ["-p", "no:cudagraph"],
}
LOOK_FOR_TORCH = "import sys, pytest; pytest.main(['-q']); sys.exit('torch' in sys.modules)"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=30)
    rounds = arguments.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n")
        imported = subprocess.run([sys.executable, "-c", LOOK_FOR_TORCH], cwd=folder, stdout=subprocess.DEVNULL)
        used_ms = _measure(folder, rounds)
    bare_ms = statistics.median(used_ms["no plugin"])
    shares = {name: _share(name, used_ms, bare_ms) for name in ARMS if name != "no plugin"}
    print(f"an empty run without a plugin: {bare_ms:.0f} ms of the CPU, {rounds} rounds")
    print(f"torch imported: {'yes' if imported.returncode else 'no'}")
    too_slow = shares["cudagraph"] > min(LIMIT_RATIO, shares["pytest-benchmark"])
    return int(too_slow or imported.returncode != 0)


def _share(name: str, used_ms: dict[str, list[float]], bare_ms: float) -> float:
    more_ms = [arm - bare for arm, bare in zip(used_ms[name], used_ms["no plugin"], strict=True)]
    low, median, high = statistics.quantiles(more_ms, n=4)
    least_ms = min(used_ms[name]) - min(used_ms["no plugin"])
    quartiles = f"quartiles {low:.1f} to {high:.1f}"
    print(f"{name} adds {median:.1f} ms ({median / bare_ms:.1%}; {quartiles}), least runs {least_ms:.1f} ms")
    return median / bare_ms


def _measure(folder: str, rounds: int) -> dict[str, list[float]]:
    order = random.Random(0)
    for options in ARMS.values():  # the first runs fill the byte-code caches
        _run_ms(folder, options)
    used_ms: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name in order.sample(list(ARMS), len(ARMS)):
            used_ms[name].append(_run_ms(folder, ARMS[name]))
    return used_ms


def _run_ms(folder: str, options: list[str]) -> float:
    """The CPU time of one run, of the user and of the system."""
    command = [sys.executable, "-m", "pytest", "-q", *OTHERS, *options]
    # Without byte-code caches every run would compile the plugin anew, as no user's does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin_s = _children_s()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
    return (_children_s() - begin_s) * 1e3


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())

"""What the idle plugin costs every pytest run of an environment: `pytest --collect-only` with and without it.

Both arms alternate in random order in one run; the figure is the median of the paired differences. Exits 1 when it is
above the limit, or when torch was imported.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_MS = 15.0
LOOK_FOR_TORCH = "import sys, pytest; pytest.main(['--collect-only', '-q']); sys.exit('torch' in sys.modules)"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=40)
    pairs = arguments.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n")
        imported = subprocess.run([sys.executable, "-c", LOOK_FOR_TORCH], cwd=folder, stdout=subprocess.DEVNULL)
        differences_ms, without_ms = _measure(folder, pairs)
    median_ms = statistics.median(differences_ms)
    quarters = statistics.quantiles(differences_ms, n=4)
    print(f"pytest --collect-only without the plugin: {statistics.median(without_ms):.0f} ms")
    print(f"the idle plugin adds {median_ms:.1f} ms (quartiles {quarters[0]:.1f} to {quarters[2]:.1f}, {pairs} pairs)")
    print(f"torch imported: {'yes' if imported.returncode else 'no'}")
    return int(median_ms > LIMIT_MS or imported.returncode != 0)


def _measure(folder: str, pairs: int) -> tuple[list[float], list[float]]:
    order = random.Random(0)
    for _ in range(2):  # the first runs fill the byte-code caches
        _run_ms(folder, [])
    differences_ms, without_ms = [], []
    for _ in range(pairs):
        arms = [("with", []), ("without", ["-p", "no:cudagraph"])]
        order.shuffle(arms)
        spent_ms = {name: _run_ms(folder, options) for name, options in arms}
        differences_ms.append(spent_ms["with"] - spent_ms["without"])
        without_ms.append(spent_ms["without"])
    return differences_ms, without_ms


def _run_ms(folder: str, options: list[str]) -> float:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    # Without byte-code caches every run would compile the plugin anew, as no user's does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    sys.exit(main())

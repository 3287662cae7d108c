"""The committed answers to the rules of capture are those that this device and the pinned torch give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMITTED = BENCHMARKS / "evidence" / "capture_rules-emulated.txt"


def test_the_device_answers_every_rule_as_committed():
    script = BENCHMARKS / "capture_rules.py"
    done = subprocess.run([sys.executable, script, "--compare", COMMITTED], capture_output=True, text=True, timeout=300)
    remedy = f"review the differences, then run python {script.name} > {COMMITTED.name}"
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{remedy}"

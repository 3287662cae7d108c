"""The rules of capture as this GPU answers them, beside the committed answers of the emulated CUDA device."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import capture_rules

SCRIPT = Path(capture_rules.__file__)
EMULATED = SCRIPT.parent / "evidence" / "capture_rules-emulated.txt"
LIMIT_S = 90.0


def ask(answers: Path) -> dict[str, Any]:
    """Run the script, keep all answers in the file ``answers``, and return those that differ. Raises RuntimeError."""
    began_s = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the rules of capture took more than {LIMIT_S:g} s") from error
    if done.returncode:
        raise RuntimeError(f"the rules of capture could not be asked: {done.stderr.strip().rpartition(chr(10))[2]}")
    answers.parent.mkdir(parents=True, exist_ok=True)
    answers.write_text(done.stdout, encoding="utf-8")
    return summary(EMULATED.read_text(encoding="utf-8"), done.stdout) | {
        "seconds": round(time.perf_counter() - began_s, 1)
    }


def summary(expected: str, found: str) -> dict[str, Any]:
    """The machines of two documents, the numbers of rules asked and equal, and the differences."""
    differences = capture_rules.differences(expected, found)
    asked = len(capture_rules.parse(found))
    return {
        "expected_of": capture_rules.machine(expected),
        "found_on": capture_rules.machine(found),
        "asked": asked,
        "equal": asked - sum(each["found"] is not None for each in differences),
        "differences": differences,
    }

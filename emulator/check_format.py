"""Say which C++ sources are not formatted as ``native/.clang-format`` asks. With ``--fix``, format them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent / "native"


def main() -> int:
    sources = [path for pattern in ("*.cpp", "*.h") for path in sorted(NATIVE.rglob(pattern))]
    options = ["-i"] if "--fix" in sys.argv[1:] else ["--dry-run", "--Werror"]
    return subprocess.run(["clang-format", *options, *sources]).returncode


if __name__ == "__main__":
    sys.exit(main())

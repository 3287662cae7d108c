"""Run the emulated CUDA runtime under the sanitizers of the compiler: addresses, undefined behaviour, threads.

    python emulator/sanitize.py

Compiles ``native/runtime`` with ``native/checks``, without torch, once for each group of sanitizers that do not go
together. Exits 1 at the first report. Needs ``g++`` with its sanitizers, and pip's access to the package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cuda_emulator.build import NATIVE, BuildError, headers, require_tools  # noqa: E402

GROUPS = ("address,undefined", "thread")
STOP = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}


def main() -> int:
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as folder:
            include = headers(Path(sys.executable), Path(folder))
            return max(_check(group, include, Path(folder)) for group in GROUPS)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


def _check(group: str, include: Path, folder: Path) -> int:
    program = folder / f"check-{group}"
    sources = [*sorted((NATIVE / "runtime").glob("*.cpp")), NATIVE / "checks" / "runtime.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-Wall", f"-fsanitize={group}", "-fno-sanitize-recover=all", f"-I{include}"]
    subprocess.run(["g++", *flags, *sources, "-o", program, "-ldl", "-pthread"], check=True)
    done = subprocess.run([program], env={**os.environ, **STOP}, capture_output=True, text=True)
    print(f"{group}: {done.stdout.strip() or 'failed'}")
    print(done.stderr[-8000:], file=sys.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

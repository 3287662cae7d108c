"""Build the distributions, check them, install each in a clean environment, and run an example from it.

``python .ci/try_package.py FOLDER`` writes below the folder alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "test_linear_classifier.py"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    built, outside = folder / "dist", folder / "outside"
    outside.mkdir(parents=True)
    shutil.copy(EXAMPLE, outside)
    # Else pytest takes the project's own configuration, from a folder above.
    (outside / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    _run(sys.executable, "-m", "build", "--outdir", built, ROOT)
    distributions = sorted(built.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *distributions)
    _run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    for number, distribution in enumerate(distributions):
        # The second one finds what the first one needed.
        again = ("--force-reinstall", "--no-deps") if number else ("-c", ROOT / "constraints.txt")
        _run(*pip, *again, distribution)
        _run(python, "-m", "pytest", "-q", "--cudagraph", "--cudagraph-json=run.json", cwd=outside)
        _run(python.with_name("pytest-cudagraph"), "report", "run.json", "--html", "run.html", cwd=outside)
        _run(python.with_name("pytest-cudagraph"), "explain", "rng", cwd=outside, stdout=subprocess.DEVNULL)
        print(f"{distribution.name}: installed, and an example run from it", flush=True)


def _run(*command: str | Path, cwd: Path | None = None, stdout: int | None = None) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, stdout=stdout, check=True)


if __name__ == "__main__":
    main()

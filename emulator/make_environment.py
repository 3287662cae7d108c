"""Make a virtual environment in which torch's CUDA build runs on the emulated CUDA device.

    python emulator/make_environment.py FOLDER          make FOLDER, or bring it up to date
    python emulator/make_environment.py --here          the environment of this Python, as tox does

Installs torch's CUDA build without its NVIDIA packages, compiles the device, and links it into the environment. Needs
pip's access to the package index, ``g++`` and ``binutils``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cuda_emulator.build import BuildError, build, index_only, require_tools  # noqa: E402

TORCH = "torch==2.13.0"
PACKAGES = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools>=77", "sympy", "typing_extensions>=4.10")
"""What torch imports, without what only a GPU needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", nargs="?", type=Path, help="the virtual environment to make")
    where.add_argument("--here", action="store_true", help="use the environment of this Python")
    arguments = parser.parse_args()
    try:
        require_tools()
        python = Path(sys.executable) if arguments.here else _environment(arguments.folder)
        _install(python)
        libraries = build(python)
        _link(python, libraries)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{python} has the emulated CUDA device")
    return 0


def _environment(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python.absolute()


def _install(python: Path) -> None:
    environment = index_only()
    for arguments in (("--no-deps", TORCH), PACKAGES):
        command = [python, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", *arguments]
        if subprocess.run(command, env=environment).returncode:
            raise BuildError(f"pip could not install {' '.join(arguments)}")


def _link(python: Path, libraries: Path) -> None:
    """Write what torch and Python look for: a ``.pth`` file and the entry point that torch loads by itself."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    (site / "cuda_emulator.pth").write_text(
        f"{HERE}\nimport cuda_emulator.preload; cuda_emulator.preload.load({str(libraries)!r})\n", encoding="utf-8"
    )
    info = site / "cuda_emulator-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-emulator\nVersion: 0.1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\ncuda_emulator = cuda_emulator:autoload\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Compile the device for one build of torch. Results are kept in a cache, by a hash of the sources and of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_emulator import operator_table, stubs

HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
"""CUDA's public headers. Only their folders ``include`` are read, and nothing of them is linked or loaded."""
NATIVE = Path(__file__).resolve().parents[1] / "native"
_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-Wall")


class BuildError(Exception):
    """The device cannot be built here: what is missing, and the remedy."""


def require_tools() -> None:
    """Raises :class:`BuildError` where a tool of the build is missing."""
    missing = [tool for tool in ("g++", "gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise BuildError(
            f"the emulated CUDA device is compiled, and this machine has no {', '.join(missing)}\n"
            "install a C++ compiler and binutils (Debian: apt install g++ binutils)"
        )


def index_only() -> dict[str, str]:
    """The environment of a pip that looks at its index only: a CPU build of torch must not be found beside it."""
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        environment.pop(name, None)
    return environment


def build(python: Path) -> Path:
    """The folder of the libraries for the torch of an environment; compiled unless the cache has it.

    Raises :class:`BuildError` where torch is no CUDA build, a tool is missing, or the compiler fails.
    """
    require_tools()
    torch = _torch_folder(python)
    folder = _cache() / _key(torch)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "lib"
        made.mkdir()
        _compile(python, torch, Path(scratch), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
    return folder


def _cache() -> Path:
    base = os.environ.get("CUDA_EMULATOR_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cuda-emulator"


def _key(torch: Path) -> str:
    """A hash of what decides the result: our sources, the version of torch, the headers."""
    digest = hashlib.sha256((torch / "version.py").read_bytes() + str(HEADERS).encode())
    for path in sorted([*NATIVE.rglob("*.cpp"), *NATIVE.rglob("*.h"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _torch_folder(python: Path) -> Path:
    ask = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    torch = Path(found.stdout.strip() or ".")
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise BuildError(f"{python} has no torch that was built with CUDA; make_environment.py installs one")
    return torch


def headers(python: Path, scratch: Path) -> Path:
    """Download CUDA's public headers into a folder. Returns the folder to include."""
    download = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
    _run([*download, *HEADERS], env=index_only())
    for path in scratch.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(scratch, [name for name in wheel.namelist() if "/include/" in name])
    return next(scratch.rglob("cuda_runtime_api.h")).parent


def _compile(python: Path, torch: Path, scratch: Path, made: Path) -> None:
    include = headers(python, scratch)
    symbols = stubs.needed_symbols(torch / "lib")
    _runtime(include, scratch, made)
    _require_whole(symbols["libcudart.so.13"], made / "libcudart.so.13")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_operators, torch, include, scratch, made), pool.submit(_nvml, include, made)]
        for soname in sorted(set(symbols) - stubs.OURS):
            jobs.append(pool.submit(_stub, soname, symbols[soname], scratch, made))
        for job in jobs:
            job.result()


def _runtime(include: Path, scratch: Path, made: Path) -> None:
    versions = scratch / "cudart.map"
    versions.write_text("libcudart.so.13 { global: *; };\n", encoding="utf-8")
    sources = sorted((NATIVE / "runtime").glob("*.cpp"))
    soname = ("-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}")
    _run(["g++", *_FLAGS, f"-I{include}", *sources, "-o", made / "libcudart.so.13", *soname, "-ldl"])
    link = ("-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", made / "libcudart.so.13", "-Wl,-rpath,$ORIGIN")
    _run(["g++", *_FLAGS, NATIVE / "driver_library.cpp", "-o", made / "libcuda.so.1", *link])


def _nvml(include: Path, made: Path) -> None:
    link = ("-Wl,-soname,libnvidia-ml.so.1", made / "libcudart.so.13", "-Wl,-rpath,$ORIGIN")
    _run(["g++", *_FLAGS, f"-I{include}", NATIVE / "nvml.cpp", "-o", made / "libnvidia-ml.so.1", *link])


def _operators(torch: Path, include: Path, scratch: Path, made: Path) -> None:
    """The sources are compiled as one: torch's headers take most of the time."""
    own = NATIVE / "operators"
    (scratch / "operator_table.h").write_text(operator_table.header(torch.parent), encoding="utf-8")
    whole = scratch / "operators.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in sorted(own.glob("*.cpp"))), encoding="utf-8")
    searched = (own, scratch, include, torch / "include", torch / "include/torch/csrc/api/include")
    folders = [f"-I{folder}" for folder in searched]
    libraries = (f"-L{torch / 'lib'}", f"-L{made}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda")
    last = ("-l:libcudart.so.13", "-Wl,--allow-shlib-undefined")
    target = made / "libcuda_emulator_operators.so"
    _run(["g++", *_FLAGS, "-DUSE_CUDA", *folders, whole, "-o", target, *libraries, *last])


def _stub(soname: str, symbols: set[tuple[str, str]], scratch: Path, made: Path) -> None:
    source, flags = stubs.write_source(soname, symbols, scratch)
    _run(["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", made / soname, f"-Wl,-soname,{soname}", *flags, source])


def _require_whole(symbols: set[tuple[str, str]], library: Path) -> None:
    """Every function that torch asks of the runtime must be there: a new torch may ask for more."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    ours = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    missing = sorted(name for name, _ in symbols if name not in ours)
    if missing:
        raise BuildError(f"this torch asks for functions that the emulated runtime lacks: {', '.join(missing)}")


def _run(command: list[object], env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env)
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr[-4000:]}")

"""Exported program to package, in a child process that can be killed as a whole."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pytest_cudagraph.errors import CudagraphError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PROGRAM, ORDER, PACKAGE, LOG, FAILURE = "program.pt2", "order.pickle", "package.pt2", "log.txt", "failure.json"
LOADED_NOT, FAILED = 3, 4
"""Exit codes of the child: it could not load the program (no package tried), or packaging raised."""
_LOG_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The settings of this process that the generated code depends on."""

    options: dict[str, Any]
    threads: int
    matmul_precision: str
    is_deterministic: bool

    @classmethod
    def here(cls, options: dict[str, Any]) -> BuildOptions:
        """The settings as they are now."""
        return cls(
            options=options,
            threads=torch.get_num_threads(),
            matmul_precision=torch.get_float32_matmul_precision(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def build(
    program: ExportedProgram, folder: Path, order: BuildOptions, timeout_s: float
) -> tuple[Path, tuple[str, ...]]:
    """Package ``program`` in ``folder``: the file, and notes.

    Raises :class:`TimeoutError` after ``timeout_s`` and :class:`~pytest_cudagraph.errors.CudagraphError` when packaging
    fails. A program that does not survive the way to another process (operators or types that only this process knows)
    is packaged here, where only an alarm can stop it.
    """
    if _save(program, folder, order):
        code = run_child(child_command(folder), folder / LOG, timeout_s)
        if code == 0:
            return folder / PACKAGE, ()
        if code != LOADED_NOT:
            raise CudagraphError(_failure_text(folder, code))
    package(program, folder / PACKAGE, order)
    return folder / PACKAGE, ("packaged in this process: another one cannot load the exported program",)


def package(program: ExportedProgram, path: Path, order: BuildOptions) -> None:
    """Run AOTInductor on ``program`` under the settings of ``order``."""
    from torch._inductor import aoti_compile_and_package

    with _settings(order):
        aoti_compile_and_package(program, package_path=str(path))


def child_command(folder: Path) -> list[str]:
    """The command whose process packages what lies in ``folder``; see ``package_worker`` beside this module."""
    return [sys.executable, "-W", "ignore", "-m", "pytest_cudagraph.compile.package_worker", str(folder)]


def run_child(command: list[str], log: Path, timeout_s: float) -> int:
    """The exit code of ``command``. Its process group dies with this call, whatever ends it."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            # The child reads this pipe to learn of its parent's death.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not packaged within {timeout_s:.0f} s") from None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def _save(program: ExportedProgram, folder: Path, order: BuildOptions) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program, folder / PROGRAM)
            (folder / ORDER).write_bytes(pickle.dumps(order))
    except OSError:
        raise
    except Exception:
        # Serialisation fails in as many ways as there are types; each means the same: this program cannot travel.
        return False
    return True


@contextmanager
def _settings(order: BuildOptions) -> Iterator[None]:
    from torch._inductor import config

    current = config.save_config_portable()
    changed = {name: value for name, value in order.options.items() if current.get(name) != value}
    before = BuildOptions.here({})
    with ExitStack() as undo:
        undo.callback(_apply, before)
        _apply(order)
        if changed:
            undo.enter_context(config.patch(changed))
        yield


def _apply(order: BuildOptions) -> None:
    if torch.get_num_threads() != order.threads:
        torch.set_num_threads(order.threads)
    torch.set_float32_matmul_precision(order.matmul_precision)
    torch.use_deterministic_algorithms(order.is_deterministic)


def _failure_text(folder: Path, code: int) -> str:
    failure = folder / FAILURE
    if failure.exists():
        return str(json.loads(failure.read_text(encoding="utf-8")))
    tail = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:]
    return "\n    ".join([f"the packaging process ended with exit code {code}", *tail])

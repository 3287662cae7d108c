"""Turn an exported program into a package, in a child process that can be killed with all its children."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_cudagraph.child_process import end_with_parent, last_lines, run_child
from pytest_cudagraph.errors import CudagraphError, first_line

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PROGRAM, SETTINGS, PACKAGE, LOG, FAILURE = "program.pt2", "settings.pickle", "package.pt2", "log.txt", "failure.json"
NOT_LOADED, FAILED = 3, 4
"""Exit codes of the child: it could not load the program, or packaging raised."""
_LOG_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The settings of this process that affect the generated code."""

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
    program: ExportedProgram, folder: Path, settings: BuildOptions, timeout_s: float
) -> tuple[Path, tuple[str, ...]]:
    """Package ``program`` in ``folder``. Returns the file and notes.

    Raises :class:`TimeoutError` after ``timeout_s``, and :class:`~pytest_cudagraph.errors.CudagraphError` if packaging
    fails. If the child cannot load the program (it uses operators or types of this process), package it in this
    process, where only an alarm can stop it.
    """
    if _save(program, folder, settings):
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            code = run_child(child_command(folder), log=folder / LOG, environment=environment, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not packaged within {timeout_s:.0f} s") from None
        if code == 0:
            return folder / PACKAGE, ()
        if code != NOT_LOADED:
            raise CudagraphError(_failure_text(folder, code))
    package(program, folder / PACKAGE, settings)
    return folder / PACKAGE, ("packaged in this process: another process cannot load the exported program",)


def package(program: ExportedProgram, path: Path, settings: BuildOptions) -> None:
    """Run AOTInductor on ``program`` with these settings."""
    from torch._inductor import aoti_compile_and_package

    with _applied(settings):
        aoti_compile_and_package(program, package_path=str(path))


def child_command(folder: Path) -> list[str]:
    """The command of a process that runs :func:`work` on ``folder``."""
    code = "import sys; from pytest_cudagraph.compile import packages; sys.exit(packages.work(sys.argv[1]))"
    return [sys.executable, "-W", "ignore", "-c", code, str(folder)]


def work(folder_name: str) -> int:
    """In the child: package the program in the folder. Returns the exit code."""
    end_with_parent()
    folder = Path(folder_name)
    settings: BuildOptions = pickle.loads((folder / SETTINGS).read_bytes())
    try:
        program = torch.export.load(folder / PROGRAM)
    except Exception:
        # The parent holds the program and can package it itself, whatever the reason.
        return NOT_LOADED
    try:
        package(program, folder / PACKAGE, settings)
    except Exception as exc:
        # The parent can read only text.
        (folder / FAILURE).write_text(json.dumps(first_line(exc)), encoding="utf-8")
        return FAILED
    return 0


def _save(program: ExportedProgram, folder: Path, settings: BuildOptions) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program, folder / PROGRAM)
            (folder / SETTINGS).write_bytes(pickle.dumps(settings))
    except OSError:
        raise
    except Exception:
        # Serialization fails in many ways. Each means that the child cannot load this program.
        return False
    return True


@contextmanager
def _applied(settings: BuildOptions) -> Iterator[None]:
    from torch._inductor import config

    current = config.save_config_portable()
    changed = {name: value for name, value in settings.options.items() if current.get(name) != value}
    before = BuildOptions.here({})
    with ExitStack() as undo:
        undo.callback(_apply, before)
        _apply(settings)
        if changed:
            undo.enter_context(config.patch(changed))
        yield


def _apply(settings: BuildOptions) -> None:
    if torch.get_num_threads() != settings.threads:
        torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    torch.use_deterministic_algorithms(settings.is_deterministic)


def _failure_text(folder: Path, code: int) -> str:
    failure = folder / FAILURE
    if failure.exists():
        return str(json.loads(failure.read_text(encoding="utf-8")))
    return "\n    ".join(
        [f"the packaging process ended with exit code {code}", *last_lines(folder / LOG)[-_LOG_LINES:]]
    )

"""One side of a comparison: the user's own pytest command in a process of its own, in the tree of that side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudagraph.errors import RevisionError
from pytest_cudagraph.units import to_ns

DOCUMENT, MODULES = "run.json", "modules.json"
"""What a sampling process leaves in its folder: the run as ``--cudagraph-json`` writes it, and what it imported."""

_TOLD_LINES = 12
"""Of a process that left nothing: the end of what it said, where pytest puts the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """What one process found of one test at one batch size. ``replay_ns`` is None where nothing was timed."""

    verdict: str
    eager_ns: float | None
    replay_ns: float | None
    """The lower quartile: the order statistic that a busy neighbour moves least (docs/statistics.md)."""
    reference_ns: float | None
    """The reference workload between the blocks of the same measurement, likewise."""
    kernels: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process found, by test name and batch size, and the files of the modules it imported."""

    batches: Mapping[tuple[str, int], SampledBatch]
    verdicts: Mapping[str, str]
    """Of every test, also of one that came to no batch size."""
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where one side runs, and how. ``top`` is the repository's own folder, ``tree`` the side's copy of it."""

    name: str
    top: Path
    tree: Path
    folder: Path
    """Where pytest was called, in the repository's own folder."""
    root: Path
    """Pytest's root directory, likewise."""
    arguments: Sequence[str]
    """The user's own command line."""
    cache: Path | None
    """Pytest's cache for this side: what was compiled for one process serves the next. None without a cache."""

    def sample(self, into: Path) -> Sample:
        """Run once and read what was found.

        Raises :class:`~pytest_cudagraph.errors.RevisionError` with the end of its output when the process leaves
        no document: collection failed, or a test killed it.
        """
        into.mkdir(parents=True)
        log = into / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(into),
                cwd=self.moved(self.folder),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait()
            finally:
                # After an interrupt it may be measuring still, in a tree that is about to go.
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return self._read(into, log, process.returncode)

    def moved(self, path: Path) -> Path:
        """The same place in this side's tree."""
        return self.tree / path.relative_to(self.top) if path.is_relative_to(self.top) else path

    def _command(self, into: Path) -> list[str]:
        told = [argument.replace(str(self.top), str(self.tree)) for argument in self.arguments]
        ours = ["--cudagraph-only", f"--cudagraph-sample={into}", "--maxfail=0"]
        cache = [] if self.cache is None else ["-o", f"cache_dir={self.cache}"]
        return [sys.executable, "-m", "pytest", *told, *ours, *cache, f"--rootdir={self.moved(self.root)}"]

    def _environment(self) -> dict[str, str]:
        """The user's environment; what is importable from the repository is imported from this side's tree.

        An editable install names the repository's own folder: only what stands before it on the path wins over it.
        """
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        below = [entry for entry in sys.path if entry and Path(entry).is_relative_to(self.top)]
        moved = [str(self.moved(Path(entry))) for entry in [*filter(None, given), *below] if not _is_installed(entry)]
        path = os.pathsep.join(dict.fromkeys(entry for entry in moved if Path(entry).is_dir()))
        return {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)

    def _read(self, into: Path, log: Path, status: int) -> Sample:
        try:
            document = json.loads((into / DOCUMENT).read_text(encoding="utf-8"))
            modules = json.loads((into / MODULES).read_text(encoding="utf-8"))
        except OSError as error:
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TOLD_LINES:]
            end = "\n".join(f"  {line}" for line in said)
            raise RevisionError(
                f"{self.name} could not be measured: pytest ended with exit code {status} and left no result. "
                f"The end of what it said:\n{end}\n"
                "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
            ) from error
        return Sample(batches=_batches(document), verdicts=_verdicts(document), modules=tuple(modules))


def foreign_modules(sample: Sample, top: Path, tree: Path) -> list[str]:
    """Modules that the process took from ``top`` although its own ``tree`` holds the very file."""
    found = [Path(file) for file in sample.modules if Path(file).is_relative_to(top)]
    return [str(file.relative_to(top)) for file in found if (tree / file.relative_to(top)).is_file()]


def _is_installed(entry: str) -> bool:
    """Whether a path holds what was installed, as in a virtual environment inside the repository."""
    return "site-packages" in Path(entry).parts or Path(entry).is_relative_to(sys.prefix)


def _batches(document: Mapping[str, Any]) -> dict[tuple[str, int], SampledBatch]:
    return {
        (test["name"], batch["batch_size"]): _batch(batch) for test in document["tests"] for batch in test["batches"]
    }


def _batch(batch: Mapping[str, Any]) -> SampledBatch:
    return SampledBatch(
        verdict=batch["verdict"],
        eager_ns=_quartile_ns(batch["eager"]),
        replay_ns=_quartile_ns(batch["replay"]),
        reference_ns=_quartile_ns(batch["reference"]),
        kernels=batch["kernels"],
    )


def _quartile_ns(latency: Mapping[str, Any] | None) -> float | None:
    return None if latency is None or latency["q25"] is None else to_ns(float(latency["q25"]))


def _verdicts(document: Mapping[str, Any]) -> dict[str, str]:
    return {test["name"]: test["verdict"] for test in document["tests"]}


def module_files(modules: Iterable[Any]) -> list[str]:
    """The files of modules, as absolute paths; what has no file (built-in, a namespace) is left out."""
    files = (getattr(module, "__file__", None) for module in modules)
    return sorted({str(Path(file).resolve()) for file in files if isinstance(file, str)})

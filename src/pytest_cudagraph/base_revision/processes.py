"""One side of a comparison: the user's own pytest command in a process of its own, in the tree of that side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_cudagraph.base_revision.checkout import moved_argument
from pytest_cudagraph.environment import without_git_locals
from pytest_cudagraph.errors import RevisionError
from pytest_cudagraph.units import to_ns

SideName = Literal["base", "head"]


def run_order(first: int, last: int) -> Iterator[tuple[SideName, SideName]]:
    """The order within each pair from number ``first`` on, ``last`` excluded.

    ABBA: who goes first changes from pair to pair, so that a machine that warms up or slows down steadily favours
    neither side.
    """
    for number in range(first, last):
        yield ("base", "head") if number % 2 == 0 else ("head", "base")


DOCUMENT, MODULES, COURSE = "run.json", "modules.json", "course.json"
"""What a sampling process leaves in its folder.

The run as ``--cudagraph-json`` writes it, what it imported, and what it collected and how each test ended.
"""


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
class CollectedOutcome:
    """How a test ended in one process (``failed in setup``), and what it said then, in a line; ``passed`` says none."""

    how: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process found, by test name and batch size, and the files of the modules it imported."""

    batches: Mapping[tuple[str, int], SampledBatch]
    modules: tuple[str, ...]
    nodeids: Mapping[str, str] = field(default_factory=dict)
    """Which test measured under a name, also one that came to no batch size."""
    ends: Mapping[str, CollectedOutcome] = field(default_factory=dict)
    """Of every test that was collected, by node id; of a file or folder that was skipped as a whole, its own."""

    def end_of(self, nodeid: str) -> CollectedOutcome | None:
        """How a test ended; None for one that was not collected."""
        whole = (end for place, end in self.ends.items() if nodeid.startswith((f"{place}::", f"{place}/")))
        return self.ends.get(nodeid) or next(whole, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutput:
    """All that a process has left. ``trouble``: why it is not to be used; empty where it is."""

    sample: Sample
    trouble: str


def read_process_output(folder: Path) -> ProcessOutput:
    """Read what a process has left in its folder; :class:`OSError` where it did not come to leave all of it."""
    document, modules, course = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in (DOCUMENT, MODULES, COURSE)
    )
    sample = Sample(
        batches=_batches(document),
        modules=tuple(modules),
        nodeids={test["name"]: test["nodeid"] for test in document["tests"]},
        ends={nodeid: CollectedOutcome(how=how, why=why) for nodeid, (how, why) in course["ends"].items()},
    )
    return ProcessOutput(sample=sample, trouble=_trouble(course))


def _trouble(course: Mapping[str, Any]) -> str:
    if course["broken"]:
        return f"could not collect {course['broken'][0] or 'its tests'}"
    return "" if course["is_finished"] else "did not come to the end of its tests"


def foreign_modules(sample: Sample, top: Path, tree: Path) -> list[str]:
    """Modules that the process took from ``top`` although its own ``tree`` holds the very file."""
    found = [Path(file) for file in sample.modules if Path(file).is_relative_to(top)]
    return [str(file.relative_to(top)) for file in found if (tree / file.relative_to(top)).is_file()]


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


def module_files(modules: Iterable[Any]) -> list[str]:
    """The files of modules, as absolute paths; what has no file (built-in, a namespace) is left out."""
    files = (getattr(module, "__file__", None) for module in modules)
    return sorted({str(Path(file).resolve()) for file in files if isinstance(file, str)})


_TOLD_LINES = 12
"""Of a process that is not to be used: the end of what it said, where pytest puts the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionProcess:
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
    paths: Sequence[str] = ()
    """Those of them that name what to collect: files, folders and node ids."""
    cache: Path | None
    """Pytest's cache for this side: what was compiled for one process serves the next. None without a cache."""

    def sample(self, into: Path) -> Sample:
        """Run once and read what was found.

        Raises :class:`~pytest_cudagraph.errors.RevisionError` with the end of its output when the process could not
        collect something, or did not come to its end. A side that lacks all that is to be collected has no tests.
        """
        gone = self._gone()
        if self.paths and gone.issuperset(self.paths):
            return Sample(batches={}, modules=())
        self._make_folder()
        into.mkdir(parents=True)
        log = into / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(into, gone),
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

    def _make_folder(self) -> None:
        """A folder that this side lacks is made anew, and empty: there the arguments mean the same files."""
        root, folder = self.moved(self.root), self.moved(self.folder)
        if not root.is_dir():
            raise RevisionError(
                f"{self.name} does not have pytest's root directory, {self.root.relative_to(self.top)}: "
                "none of its tests can be measured there"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def _gone(self) -> frozenset[str]:
        """What of ``paths`` this side lacks; pytest would refuse all of the command for one of them."""
        # A word that is also an option's value (-k new new) cannot be told from it, and stays.
        own = [path for path in self.paths if self.arguments.count(path) == self.paths.count(path)]
        files = {path: Path(os.path.normpath(self.folder / path.partition("::")[0])) for path in own}
        return frozenset(path for path, file in files.items() if file.exists() and not self.moved(file).exists())

    def _command(self, into: Path, gone: Container[str] = ()) -> list[str]:
        kept = [argument for argument in self.arguments if argument not in gone]
        told = [moved_argument(argument, self.top, self.tree) for argument in kept]
        # What follows it are files, whatever they are called.
        dashes = told.index("--") if "--" in told else len(told)
        # A base whose settings do not switch the plugin on would measure nothing.
        ours = ["--cudagraph", "--cudagraph-only", f"--cudagraph-sample={into}", "--maxfail=0"]
        ours += [] if self.cache is None else ["-o", f"cache_dir={self.cache}"]
        ours += [f"--rootdir={self.moved(self.root)}"]
        return [sys.executable, "-m", "pytest", *told[:dashes], *ours, *told[dashes:]]

    def _environment(self) -> dict[str, str]:
        """The user's environment; what is importable from the repository is imported from this side's tree.

        An editable install names the repository's own folder: only what stands before it on the path wins over it.
        """
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        below = [entry for entry in sys.path if entry and Path(entry).is_relative_to(self.top)]
        moved = [str(self.moved(Path(entry))) for entry in [*filter(None, given), *below] if not _is_installed(entry)]
        path = os.pathsep.join(dict.fromkeys(entry for entry in moved if Path(entry).is_dir()))
        # In a git hook the tests' own git is to find the checkout, not the repository of the hook.
        return {**without_git_locals(), **({"PYTHONPATH": path} if path else {})}

    def _read(self, into: Path, log: Path, status: int) -> Sample:
        try:
            remains = read_process_output(into)
        except OSError as error:
            raise self._unusable("left no result", log, status) from error
        if remains.trouble:
            raise self._unusable(remains.trouble, log, status)
        return remains.sample

    def _unusable(self, trouble: str, log: Path, status: int) -> RevisionError:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TOLD_LINES:]
        end = "\n".join(f"  {line}" for line in said)
        return RevisionError(
            f"{self.name} could not be measured: pytest ended with exit code {status} and {trouble}. "
            f"The end of what it said:\n{end}\n"
            "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
        )


def _is_installed(entry: str) -> bool:
    """Whether a path holds what was installed, as in a virtual environment inside the repository."""
    return "site-packages" in Path(entry).parts or Path(entry).is_relative_to(sys.prefix)

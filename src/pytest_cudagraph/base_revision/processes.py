"""One side of a comparison: the user's pytest command in its own process, in the tree of that side.

The process records its tests, how each ended, and the imported modules.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_cudagraph import files
from pytest_cudagraph.base_revision.checkout import moved_argument
from pytest_cudagraph.child_process import end_with_parent, last_lines, run_child
from pytest_cudagraph.environment import without_git_locals
from pytest_cudagraph.errors import RevisionError
from pytest_cudagraph.foreign import first_line_of
from pytest_cudagraph.report import run_of_document
from pytest_cudagraph.settings.registered import uses_plugin
from pytest_cudagraph.values import BatchReport

SideName = Literal["base", "head"]


def run_order(first: int, last: int) -> Iterator[tuple[SideName, SideName]]:
    """The order within each pair from number ``first`` on, ``last`` excluded.

    ABBA: the first side changes from pair to pair, so that a steady drift of the machine favours neither side.
    """
    for number in range(first, last):
        yield ("base", "head") if number % 2 == 0 else ("head", "base")


DOCUMENT, MODULES, COURSE = "run.json", "modules.json", "course.json"
"""The files that a sampling process writes into its folder.

The document of ``--cudagraph-json``, the imported modules, and the collected tests with their outcomes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedOutcome:
    """How a test ended in one process (``failed in setup``) and the first line of its error."""

    how: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The result of one process, by test name and batch size, and the files of the modules it imported."""

    batches: Mapping[tuple[str, int], BatchReport]
    modules: tuple[str, ...]
    nodeids: Mapping[str, str] = field(default_factory=dict)
    """The test that used each name, also if it reached no batch size."""
    ends: Mapping[str, CollectedOutcome] = field(default_factory=dict)
    """By the node id of each collected test, or of a file or folder that was skipped as a whole."""

    def end_of(self, nodeid: str) -> CollectedOutcome | None:
        """How a test ended. None if it was not collected."""
        whole = (end for place, end in self.ends.items() if nodeid.startswith((f"{place}::", f"{place}/")))
        return self.ends.get(nodeid) or next(whole, None)


def read_process_output(folder: Path) -> tuple[Sample, str]:
    """The files of a process, and why they are unusable (empty if they are usable).

    Raises :class:`OSError` if one is missing, :class:`ValueError` if one is damaged.
    """
    document, modules, course = (files.read_json(folder / name) for name in (DOCUMENT, MODULES, COURSE))
    reports = run_of_document(document).reports
    sample = Sample(
        batches={(each.name, batch.batch_size): batch for each in reports for batch in each.batches},
        modules=tuple(modules),
        nodeids={each.name: each.nodeid for each in reports},
        ends={nodeid: CollectedOutcome(how=how, why=why) for nodeid, (how, why) in course["ends"].items()},
    )
    trouble = "" if course["is_finished"] else "did not come to the end of its tests"
    if course["broken"]:
        trouble = f"could not collect {course['broken'][0] or 'its tests'}"
    return sample, trouble


def foreign_modules(sample: Sample, top: Path, tree: Path) -> list[str]:
    """Modules that the process imported from ``top`` although its own ``tree`` has the same file."""
    imported = [Path(file) for file in sample.modules if Path(file).is_relative_to(top)]
    return [str(file.relative_to(top)) for file in imported if (tree / file.relative_to(top)).is_file()]


def module_files(modules: Iterable[Any]) -> list[str]:
    """The files of modules, as absolute paths. Built-in and namespace modules have none."""
    paths = (getattr(module, "__file__", None) for module in modules)
    return sorted({str(Path(path).resolve()) for path in paths if isinstance(path, str)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How the user called pytest."""

    arguments: Sequence[str]
    paths: Sequence[str] = ()
    """The arguments that name what to collect: files, folders and node ids."""
    folder: Path
    """Where pytest was called."""
    root: Path
    """Pytest's root directory."""
    has_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionProcess:
    """How one side runs. ``top`` is the repository's folder, ``tree`` is this side's copy of it."""

    name: str
    top: Path
    tree: Path
    command: Command
    cache: Path
    """Pytest's cache for this side, so that processes share compiled code."""

    def sample(self, into: Path) -> Sample:
        """Run once and read the results.

        Raises :class:`~pytest_cudagraph.errors.RevisionError` with the end of the output if the process could not
        collect something or did not finish. A side without any of ``paths`` has no tests.
        """
        gone = self._gone()
        if self.command.paths and gone.issuperset(self.command.paths):
            return Sample(batches={}, modules=())
        self._make_folder()
        into.mkdir(parents=True)
        log = into / "output.txt"
        command, folder = self._command(into, gone), self.moved(self.command.folder)
        status = run_child(command, log=log, folder=folder, environment=self._environment())
        return self._read(into, log, status)

    def moved(self, path: Path) -> Path:
        """The same place in this side's tree."""
        return self.tree / path.relative_to(self.top) if path.is_relative_to(self.top) else path

    def _make_folder(self) -> None:
        """Create the folder in which pytest is called if this side lacks it, so that relative arguments stay valid."""
        root, folder = self.moved(self.command.root), self.moved(self.command.folder)
        if not root.is_dir():
            raise RevisionError(
                f"{self.name} does not have pytest's root directory, {self.command.root.relative_to(self.top)}: "
                "none of its tests can be measured there"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def _gone(self) -> frozenset[str]:
        """Those of ``paths`` that this side lacks. Pytest would refuse the whole command for one of them."""
        # A word that is also an option's value (-k new new) cannot be distinguished from it, and stays.
        paths, count = self.command.paths, self.command.arguments.count
        plain = [path for path in paths if count(path) == paths.count(path)]
        named = {path: Path(os.path.normpath(self.command.folder / path.partition("::")[0])) for path in plain}
        return frozenset(path for path, file in named.items() if file.exists() and not self.moved(file).exists())

    def _command(self, into: Path, gone: Container[str] = ()) -> list[str]:
        kept = [argument for argument in self.command.arguments if argument not in gone]
        moved = [moved_argument(argument, self.top, self.tree) for argument in kept]
        # Only files follow it.
        dashes = moved.index("--") if "--" in moved else len(moved)
        # The settings of the base may not enable the plugin.
        ours = ["--cudagraph", "--cudagraph-only", f"--cudagraph-sample={into}", "--maxfail=0"]
        ours += ["-o", f"cache_dir={self.cache}"] if self.command.has_cache else []
        ours += [f"--rootdir={self.moved(self.command.root)}"]
        return [sys.executable, "-m", "pytest", *moved[:dashes], *ours, *moved[dashes:]]

    def _environment(self) -> dict[str, str]:
        """The user's environment. Modules of the repository are imported from this side's tree.

        An editable install names the repository's own folder. Entries before it on the path take precedence.
        """
        search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        below = [entry for entry in sys.path if entry and Path(entry).is_relative_to(self.top)]
        sources = [entry for entry in (*filter(None, search_path), *below) if not _is_installed(entry)]
        moved = [str(self.moved(Path(entry))) for entry in sources]
        path = os.pathsep.join(dict.fromkeys(entry for entry in moved if Path(entry).is_dir()))
        # In a git hook, git in the tests must find the checkout, not the repository of the hook.
        return {**without_git_locals(), **({"PYTHONPATH": path} if path else {})}

    def _read(self, into: Path, log: Path, status: int) -> Sample:
        try:
            sample, trouble = read_process_output(into)
        except OSError as error:
            raise self._unusable("left no result", log, status) from error
        except ValueError as error:
            raise self._unusable(f"left a result that cannot be read ({error})", log, status) from error
        if trouble:
            raise self._unusable(trouble, log, status)
        return sample

    def _unusable(self, trouble: str, log: Path, status: int) -> RevisionError:
        end = "\n".join(f"  {line}" for line in last_lines(log))
        return RevisionError(
            f"{self.name} could not be measured: pytest ended with exit code {status} and {trouble}. "
            f"The end of its output:\n{end}\n"
            "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
        )


def _is_installed(entry: str) -> bool:
    """Whether a path holds installed packages, as in a virtual environment inside the repository."""
    return "site-packages" in Path(entry).parts or Path(entry).is_relative_to(sys.prefix)


def record_base_run(config: pytest.Config, folder: Path) -> None:
    """Let this process write its record into ``folder``, and end with the process that started it."""
    end_with_parent()
    config.pluginmanager.register(BaseRunRecorder(config, folder), "pytest-cudagraph-base-recorder")


class BaseRunRecorder:
    """A pytest plugin. Without it, a test that could not be measured would look like a test that does not exist."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[str, tuple[str, str]] = {}
        self._broken: list[str] = []
        self._wanted = [] if config.option.pyargs else _take_names(config)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._ends.setdefault(item.nodeid, ("not run", ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(report.nodeid)
        elif report.skipped:
            self._ends[report.nodeid] = ("skipped", _skip_text(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        named = {item: not self._wanted or any(_names(*each, item) for each in self._wanted) for item in items}
        others = [item for item in items if not named[item]]
        if others:
            items[:] = [item for item in items if named[item]]
            config.hook.pytest_deselected(items=others)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._ends[item.nodeid] = ("deselected" if uses_plugin(item) else "without a fixture of this plugin", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._ends[report.nodeid] = ("skipped", _skip_text(report))
        elif report.failed:
            how = "failed" if report.when == "call" else f"failed in {report.when}"
            self._ends[report.nodeid] = (how, _error_text(report))
        elif report.passed and report.when == "call":
            self._ends[report.nodeid] = ("passed", "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        codes = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        course = {"is_finished": exitstatus in codes, "broken": self._broken, "ends": self._ends}
        (self._folder / COURSE).write_text(json.dumps(course), encoding="utf-8")
        (self._folder / MODULES).write_text(json.dumps(module_files(sys.modules.values())), encoding="utf-8")


def _take_names(config: pytest.Config) -> list[tuple[Path, str]]:
    """Let pytest collect whole files instead of single tests, and return the tests that were named.

    Pytest runs nothing if a file lacks one of the named tests. Here such a test is one that this revision lacks.
    """
    named = [argument.partition("::") for argument in config.args]
    if not any(colons for _, colons, _ in named):
        return []
    config.args = list(dict.fromkeys(file for file, _, _ in named))
    folder = config.invocation_params.dir
    return [(Path(os.path.normpath(folder / file)), names) for file, _, names in named]


def _names(path: Path, names: str, item: pytest.Item) -> bool:
    """Whether ``path::names`` names a test, by a folder, file, class, function or parameter."""
    test = item.nodeid.partition("::")[2]
    is_below = path == item.path or path in item.path.parents
    return is_below and (not names or test == names or test.startswith((f"{names}::", f"{names}[")))


def _skip_text(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return first_line_of(report.longrepr[2].removeprefix("Skipped: "))
    return first_line_of(getattr(report, "wasxfail", ""))


def _error_text(report: pytest.TestReport) -> str:
    """``FileNotFoundError: ...``, or the first line of an error that pytest formats itself."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return first_line_of(crash.message)
    lines = [line.removeprefix("E").strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return first_line_of("\n".join(lines) or report.longreprtext)

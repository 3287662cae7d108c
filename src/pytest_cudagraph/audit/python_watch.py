"""The model's own Python in a call: branches on values that change from call to call, and reads of the date.

Equal calls do not show them: the branch went the same way, and the date was the same."""

from __future__ import annotations

import ast
import datetime
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from pytest_cudagraph.audit.trace import Trace
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.sources import Sites, library_of, origin_of, user_sites
from pytest_cudagraph.sources.syntax import function_of, name_of, running_call, tests_of
from pytest_cudagraph.values import Site

# No clocks that tick between two calls (time.time, perf_counter): most are used for timing, and where such a number
# reaches an operation, equal calls differ. No environment either: it does not change by itself.
_DATES = frozenset(
    {
        *(time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime, datetime.date.today),
        *(datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today),
    }
)
_ARGUMENTS_WITHOUT_A_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}

_PLAIN = (int, float, bool, str, type(None))
_MAX_ENTRIES = 64
"""Entries of a global container. Longer ones are data."""


class PythonWatch:
    """Collects the functions that run in a call, and where they read the date: see :meth:`watching`."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._reads: list[tuple[str, Sites]] = []
        self._is_on = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside, but nothing where a profiler holds Python's profiling hook."""
        if sys.getprofile() is not None:
            yield
            return
        self._is_on = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            self._is_on = False
            sys.setprofile(None)

    def paused_in(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` without the watch, which would make each of its steps slower."""

        def unwatched(*args: Any) -> Any:
            if not self._is_on:
                return run(*args)
            sys.setprofile(None)
            try:
                return run(*args)
            finally:
                sys.setprofile(self._note)

        return unwatched

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._functions[id(frame.f_code)] = frame.f_code, frame.f_globals
        elif event == "c_call" and arg in _DATES and _reads_now(frame, arg.__name__):
            self._reads.append((arg.__qualname__, user_sites()))

    def globals(self) -> dict[str, Any]:
        """The present plain values of the globals that these functions name."""
        return {
            name: value
            for code, namespace in self._functions.values()
            if origin_of(code.co_filename) != "machinery"
            for name in code.co_names
            if (value := _plain(namespace.get(name, _NOTHING))) is not _NOTHING
        }

    def warnings(self, trace: Trace, attributes: list[str], variables: list[str]) -> tuple[RawFinding, ...]:
        """Branches that read one of these moving values, and reads of the date.

        Only in the user's project, and in libraries that ran an operation in ``trace``: others log and show progress.
        """
        files = {operation.site.file for operation in trace.operations if operation.site is not None}
        libraries = {library_of(file) for file in files} | {""}
        branches = self._branches(libraries, attributes, variables) if attributes or variables else ()
        return (*branches, *self._dates(libraries))

    def _branches(self, libraries: set[str], attributes: list[str], variables: list[str]) -> Iterator[RawFinding]:
        for code, _ in self._functions.values():
            if origin_of(code.co_filename) == "machinery" or library_of(code.co_filename) not in libraries:
                continue
            for line, name in branches_on(code, attributes, variables).items():
                site = Site(file=code.co_filename, line=line, function=code.co_name)
                yield RawFinding(id="control-flow", level="warning", text=f"{name} moves with each call", site=site)

    def _dates(self, libraries: set[str]) -> Iterator[RawFinding]:
        for name, (site, called_from) in self._reads:
            if site is not None and library_of(site.file) in libraries:
                text = f"{name} reads the clock"
                yield RawFinding(id="baked-scalar", level="warning", text=text, site=site, called_from=called_from)


_NOTHING = object()


def _plain(value: Any) -> Any:
    """A copy of a plain value, or of the plain entries of a short container."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, deque, dict) and len(value) <= _MAX_ENTRIES:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: entry for key, entry in entries if type(entry) in _PLAIN}
    return _NOTHING


def _reads_now(frame: FrameType, name: str) -> bool:
    """Whether the call takes the present time, and the model's code makes it. Others only convert a given time."""
    if origin_of(frame.f_code.co_filename) == "machinery":
        return False
    call = running_call(frame, frozenset({name}))
    most = _ARGUMENTS_WITHOUT_A_TIME.get(name)
    return call is None or most is None or len(call.args) <= most


_NUMBERS = frozenset({"len", "int", "float", "bool", "abs", "round", "min", "max"})


def branches_on(code: CodeType, attributes: Collection[str], variables: Collection[str]) -> dict[int, str]:
    """The lines of conditions (``if``, ``while``, ``a if b else c``) that read one of the values, and its name.

    ``attributes`` are paths such as ``encoder.calls``. ``self.calls`` reads it, and so does ``self.encoder.calls``.
    ``variables`` are names of globals. A local name of such a value counts too.
    """
    known = {*code.co_names, *code.co_freevars}
    paths = [path for path in map(_steps, attributes) if path[-1] in known]
    closed_over = {path[0] for path in paths if len(path) == 1 and path[0] in code.co_freevars}
    names = {name: name for name in {*variables, *closed_over} if name in known and name not in code.co_varnames}
    if not paths and not names:
        return {}
    tree, lines = function_of(code), {line for *_, line in code.co_lines()}
    names |= dict(_local_names(tree, paths, names))
    found = ((test.lineno, _read_in(test, paths, names)) for test in tests_of(tree))
    return {line: name for line, name in found if name and line in lines}


def _local_names(tree: ast.AST, paths: list[tuple[str, ...]], names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The local names that are assigned from one of the values without a call: ``step = self.steps + 1``."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(node, ast.Assign | ast.NamedExpr) or not isinstance(target, ast.Name):
            continue
        calls = (each for each in ast.walk(node.value) if isinstance(each, ast.Call))
        name = _read_in(node.value, paths, names)
        if name and all(name_of(call.func) in _NUMBERS for call in calls):
            yield target.id, name


def _read_in(tree: ast.AST, paths: list[tuple[str, ...]], names: dict[str, str]) -> str:
    """The name of the first of the values that an expression reads. Empty if it reads none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.Attribute):
            read = _attributes_of(node)
            if any(path[-len(read) :] == read for path in paths):
                return ".".join(read)
    return ""


def _attributes_of(node: ast.expr) -> tuple[str, ...]:
    """``("layers", "calls")`` for ``self.layers[0].calls``."""
    if isinstance(node, ast.Subscript):
        return _attributes_of(node.value)
    return (*_attributes_of(node.value), node.attr) if isinstance(node, ast.Attribute) else ()


def _steps(path: str) -> tuple[str, ...]:
    """``("layers", "calls")`` for ``layers[0].calls``."""
    return tuple(step.partition("[")[0] for step in path.split("."))

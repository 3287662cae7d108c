"""The model's own Python in a call: branches on values that change from call to call, and reads of the date.

Equal calls do not show them: the branch went the same way, and the date was the same.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from pytest_cudagraph.audit.trace import Trace
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.sources import Sites, library_of, origin_of, user_sites
from pytest_cudagraph.sources.conditions import branches_on
from pytest_cudagraph.sources.syntax import running_call
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

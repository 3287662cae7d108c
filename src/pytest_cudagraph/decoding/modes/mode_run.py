"""Run one mode in a process of its own: what it gets in files, the engine pickled, and what it left."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from pytest_cudagraph.child_process import last_lines, run_child, shown_line
from pytest_cudagraph.decoding.modes.engines import Engine, LoadRequest
from pytest_cudagraph.decoding.modes.results import EngineMode, ModeFailure, RequestErrors, Stage
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import message_of, printable_lines, value_text
from pytest_cudagraph.units import plural

RESULT, STAGE = "result.json", "stage.txt"
"""What the process leaves: at its end, and before each of its stages."""
_ENGINE, _MODULES = "engine.pickle", "modules.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRequest:
    """One mode of an engine, and what it generates."""

    engine: Engine
    load: LoadRequest
    arguments: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    count: int
    generations: int
    """Timed ones. One more before them is not timed."""
    requests: int = 0
    """Sent at once after them, to count errors."""


T = TypeVar("T", int, float)


class _Pickler(pickle.Pickler):
    """Notes the file of each module whose functions and classes are pickled, because pickle only keeps its name."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into)
        self.files: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            file = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if file:
                self.files[obj.__module__] = str(Path(file).resolve())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, files: Mapping[str, str]) -> None:
        super().__init__(file)
        self._files = files

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        file = self._files.get(module_name)
        if file is not None and module_name not in sys.modules:
            _import_from(module_name, file)
        return super().find_class(module_name, global_name)


def _import_from(name: str, file: str) -> None:
    """Import a module from its file unless Python finds the same file itself: a test file is on no path."""
    if _found_file(name) == file:
        importlib.import_module(name)
        return
    loader = importlib.machinery.SourceFileLoader(name, file)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)


def _found_file(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else str(Path(spec.origin).resolve())


def write_request(request: ModeRequest, folder: Path) -> None:
    """Raises :class:`~pytest_cudagraph.errors.InputError` for an engine or an argument that cannot be pickled."""
    into = io.BytesIO()
    pickler = _Pickler(into)
    try:
        pickler.dump(request)
    # Pickle raises PicklingError, AttributeError or TypeError, and a user's __reduce__ anything.
    except Exception as error:
        raise InputError(
            f"each mode runs in a process of its own, so the engine and its arguments must be picklable; found "
            f"{value_text(request.engine)} with {value_text(request.arguments)}: {message_of(error)}\n"
            "  fix: a factory is a function at the top of a module, not a lambda or a function inside a test"
        ) from error
    (folder / _ENGINE).write_bytes(into.getvalue())
    (folder / _MODULES).write_text(json.dumps(pickler.files), encoding="utf-8")


def read_request(folder: Path) -> ModeRequest:
    """In the process of the mode. Raises what the import of the user's module raises."""
    files = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
    with (folder / _ENGINE).open("rb") as file:
        request = _Unpickler(file, files).load()
    assert isinstance(request, ModeRequest)
    return request


_MOST_CHARACTERS = 1000
"""Of an engine's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStamps:
    """One row of one generation: when the request began, its tokens, and when each was there."""

    start_ns: int
    tokens: tuple[int, ...]
    stamps_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """What the process of a mode left: the rows of each generation, without times in ``mode`` yet."""

    mode: EngineMode
    generations: Sequence[Sequence[RowStamps]] = ()


def run_mode(request: ModeRequest, timeout_s: float) -> ModeRun:
    """Run one mode to its end. A failure of the engine is in ``mode.failure``.

    Raises :class:`~pytest_cudagraph.errors.InputError` for what cannot be sent to a process, and for one that the
    engine raised.
    """
    with tempfile.TemporaryDirectory(prefix="pytest-cudagraph-") as name:
        folder = Path(name)
        write_request(request, folder)
        how = _run(folder, timeout_s)
        return _read(folder, request, how)


def _run(folder: Path, timeout_s: float) -> str:
    """Run the process. Return how it ended."""
    command = [sys.executable, "-m", "pytest_cudagraph.decoding.modes.mode_process", str(folder)]
    path = os.pathsep.join(filter(None, dict.fromkeys(sys.path)))
    # Of a process that crashes, the output has what was printed before, and the lines of Python where it was.
    tells = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment = {**os.environ, "PYTHONPATH": path, **tells}
    try:
        status = run_child(command, log=folder / "output.txt", environment=environment, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        (folder / RESULT).unlink(missing_ok=True)
        return f"its process did not end within {timeout_s:g} s and was killed (timeout_s=)"
    ended = f"was killed by {_signal(-status)}" if status < 0 else f"ended with exit code {status}"
    return f"its process {ended} and left no result"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(folder: Path, request: ModeRequest, how: str) -> ModeRun:
    output = tuple(last_lines(folder / "output.txt"))
    try:
        told = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except OSError:
        stage_file = folder / STAGE
        stage: Stage = stage_file.read_text(encoding="utf-8") if stage_file.exists() else "start"  # type: ignore[assignment]
        return ModeRun(mode=EngineMode(failure=ModeFailure(stage=stage, error=how, is_raised=False, output=output)))
    failure = _failure(told, output) or _wrong_counts(told["generations"], request)
    receipt = told.get("receipt")
    mode = EngineMode(
        load_ns=told.get("load_ns"),
        capture_ns=told.get("capture_ns"),
        capture_bytes=told.get("capture_bytes"),
        host_bytes=told.get("host_bytes"),
        device_bytes=told.get("device_bytes"),
        receipt=None if receipt is None else GenerationReceipt(**receipt),
        waited_ratio=told.get("waited_ratio"),
        errors=None if told.get("errors") is None else RequestErrors.of(request.requests, told["errors"]),
        failure=failure,
        output=() if failure else tuple(graph_lines(folder / "output.txt") or output),
    )
    return ModeRun(mode=mode, generations=() if failure else [_rows(each) for each in told["generations"]])


_READ_CHARACTERS = 1 << 22
_ABOUT_GRAPHS = re.compile("graph|eager|captur", re.IGNORECASE)
_GRAPH_LINES = 8


def graph_lines(log: Path) -> list[str]:
    """The last different lines of an output that speak of graphs: the engine's own words where it ran without them."""
    with log.open(encoding="utf-8", errors="replace") as output:
        lines = output.read(_READ_CHARACTERS).splitlines()
    return list(dict.fromkeys(shown_line(line) for line in lines if _ABOUT_GRAPHS.search(line)))[-_GRAPH_LINES:]


def _failure(told: Mapping[str, Any], output: tuple[str, ...]) -> ModeFailure | None:
    found = told.get("failure")
    if found is None:
        return None
    if found["mistake"] is not None:
        raise InputError(found["mistake"])
    error = printable_lines(found["error"])
    if len(error) > _MOST_CHARACTERS:
        error = f"{error[:_MOST_CHARACTERS]}..."
    return ModeFailure(stage=found["stage"], error=error, is_raised=True, output=output)


def _wrong_counts(generations: Sequence[Mapping[str, Any]], request: ModeRequest) -> ModeFailure | None:
    rows, count = len(request.prompts), request.count
    allowed = f"each generation gives {plural(count, 'token')} for each of {plural(rows, 'row')}"
    for found in generations:
        counts = {row: len(tokens) for row, tokens in zip(found["rows"], found["tokens"], strict=True)}
        if counts != dict.fromkeys(range(rows), count):
            error = f"{allowed}; found {_counts_text(counts, count)}"
            return ModeFailure(stage="generate", error=error, is_raised=False)
    return None


def _counts_text(counts: Mapping[int, int], count: int) -> str:
    odd = next(((row, found) for row, found in counts.items() if found != count), None)
    return f"rows {list(counts)}" if odd is None else f"{plural(odd[1], 'token')} for row {odd[0]}"


def _rows(found: Mapping[str, Any]) -> list[RowStamps]:
    return [
        RowStamps(start_ns=found["start_ns"], tokens=tuple(tokens), stamps_ns=tuple(stamps_ns))
        for tokens, stamps_ns in zip(found["tokens"], found["stamps_ns"], strict=True)
    ]


def joined(runs: Sequence[ModeRun]) -> ModeRun:
    """The processes of one mode as one. The first load and capture are told, the most memory, and every generation."""
    failed = next((run for run in runs if run.mode.failure is not None), None)
    if failed is not None or not runs:
        return failed or ModeRun(mode=EngineMode())
    modes = [run.mode for run in runs]
    mode = replace(
        modes[0],
        host_bytes=_most(each.host_bytes for each in modes),
        device_bytes=_most(each.device_bytes for each in modes),
        receipt=_receipt([each.receipt for each in modes if each.receipt is not None], len(modes)),
        waited_ratio=_most(each.waited_ratio for each in modes),
        errors=_errors([each.errors for each in modes if each.errors is not None]),
    )
    return ModeRun(mode=mode, generations=[generation for run in runs for generation in run.generations])


def _most(values: Iterable[T | None]) -> T | None:
    return max((value for value in values if value is not None), default=None)


def _receipt(receipts: Sequence[GenerationReceipt], of: int) -> GenerationReceipt | None:
    """The sum. None if a process told nothing."""
    if len(receipts) < of:
        return None
    return GenerationReceipt(
        steps=sum(each.steps for each in receipts),
        replays=sum(each.replays for each in receipts),
        piecewise=sum(each.piecewise for each in receipts),
        padded_rows=max(each.padded_rows for each in receipts),
        eager=dict(sum((Counter(each.eager) for each in receipts), Counter())),
    )


def _errors(errors: Sequence[RequestErrors]) -> RequestErrors | None:
    if not errors:
        return None
    return RequestErrors(
        requests=sum(each.requests for each in errors),
        failed=sum(each.failed for each in errors),
        first=next((each.first for each in errors if each.first), ""),
    )

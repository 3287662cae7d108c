"""The process of one mode: load the engine, generate, and leave the result in a file.

``python -m pytest_cudagraph.decoding.modes.mode_process FOLDER``. What the engine prints goes to another file.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from pytest_cudagraph.child_process import end_with_parent
from pytest_cudagraph.decoding.modes.engines import LoadedEngine
from pytest_cudagraph.decoding.modes.mode_run import RESULT, STAGE, ModeRequest, read_request
from pytest_cudagraph.decoding.modes.results import Stage
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.environment import start_nvml, stop_nvml
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.foreign import message_of, value_text
from pytest_cudagraph.units import plural


class ModeProcess:
    """One mode, from load to close. ``result`` is what is known so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stage: Stage = "start"
        self.result: dict[str, Any] = {"generations": []}

    def run(self) -> None:
        """Run the mode. Whatever it raises is part of the result."""
        try:
            self._run()
        # An engine may also call sys.exit, and a test file skip itself when it is imported.
        except BaseException as error:
            self.result["failure"] = _failure(error, self._stage)
        self._write()

    def _run(self) -> None:
        self._enter("load")
        request = read_request(self._folder)
        before = used_device_bytes()
        start_ns = time.perf_counter_ns()
        engine = request.engine.load(request.load, **request.arguments)
        self.result["load_ns"] = time.perf_counter_ns() - start_ns
        self._enter("generate")
        first = generate(engine, request)  # untimed: what it captures and compiles is no fallback
        told_before = engine.facts().receipt
        before_ns = scheduled_ns()
        for _ in range(request.generations):
            self.result["generations"].append(generate(engine, request))
        self.result["waited_ratio"] = waited_ratio(before_ns, scheduled_ns())
        counted = sum(found["decode_steps"] for found in (first, *self.result["generations"]))
        self._tell(engine, told_before, counted, before)
        if request.requests:
            self.result["errors"] = request_errors(engine, request)
        self._enter("close")
        engine.close()

    def _tell(
        self, engine: LoadedEngine, told_before: GenerationReceipt | None, counted: int, before: int | None
    ) -> None:
        facts, used, receipt = engine.facts(), used_device_bytes(), None
        if facts.receipt is not None:
            check_receipt(facts.receipt, counted)
            receipt = since(facts.receipt, told_before)
        self.result |= {
            "capture_ns": facts.capture_ns,
            "capture_bytes": facts.capture_bytes,
            "receipt": None if receipt is None else asdict(receipt),
            "host_bytes": resident_bytes(),
            "device_bytes": None if used is None or before is None else used - before,
        }

    def _enter(self, stage: Stage) -> None:
        """Also in a file, for a process that is killed."""
        self._stage = stage
        (self._folder / STAGE).write_text(stage, encoding="utf-8")

    def _write(self) -> None:
        part = self._folder / f"{RESULT}.part"
        part.write_text(json.dumps(self.result), encoding="utf-8")
        part.replace(self._folder / RESULT)


def since(receipt: GenerationReceipt, before: GenerationReceipt | None) -> GenerationReceipt:
    """The steps that a receipt has beyond an earlier one."""
    if before is None:
        return receipt
    return replace(
        receipt,
        steps=receipt.steps - before.steps,
        replays=receipt.replays - before.replays,
        piecewise=receipt.piecewise - before.piecewise,
        eager=dict(Counter(receipt.eager) - Counter(before.eager)),
    )


def check_receipt(receipt: GenerationReceipt, counted: int) -> None:
    """Raises :class:`~pytest_cudagraph.errors.InputError` for one that its own figures or the tokens contradict.

    ``counted`` are the steps that gave a row its second or a later token. A receipt may have more: an engine may run
    steps of which a row is no part.
    """
    if receipt.replays > receipt.steps:
        found = f"{receipt.replays} replays in {receipt.steps} steps"
        raise InputError(f"decode steps include those that replayed a graph; found {found}")
    if receipt.steps < counted:
        found = f"a receipt of {plural(receipt.steps, 'decode step')}, and {counted} that gave tokens"
        raise InputError(f"facts() tells of every decode step of all generations so far; found {found}")


def generate(engine: LoadedEngine, request: ModeRequest) -> dict[str, Any]:
    """One generation: when it began, its decode steps, and per row its tokens and when each was there, in ns."""
    start_ns = time.perf_counter_ns()
    tokens: dict[int, list[int]] = {}
    stamps_ns: dict[int, list[int]] = {}
    steps: dict[int, int] = {}
    for step in engine.generate(request.prompts, request.count):
        now_ns = time.perf_counter_ns()
        for row, new in step.items():
            if isinstance(new, Exception):
                raise new
            tokens.setdefault(int(row), []).extend(_whole(token, row) for token in new)
            stamps_ns.setdefault(int(row), []).extend([now_ns] * len(new))
            steps[int(row)] = steps.get(int(row), 0) + bool(len(new))
    rows = sorted(tokens)
    return {
        "start_ns": start_ns,
        "decode_steps": _decode_steps(stamps_ns, steps),
        "rows": rows,
        "tokens": [tokens[row] for row in rows],
        "stamps_ns": [stamps_ns[row] for row in rows],
    }


def request_errors(engine: LoadedEngine, request: ModeRequest) -> dict[int, str]:
    """Send many requests at once, the prompts in turn. Those without all of their tokens, and why."""
    many = [request.prompts[number % len(request.prompts)] for number in range(request.requests)]
    counts, errors = dict.fromkeys(range(len(many)), 0), dict[int, str]()
    try:
        for step in engine.generate(many, request.count):
            for row, new in step.items():
                if isinstance(new, Exception):
                    errors[int(row)] = f"{type(new).__name__}: {message_of(new)}"
                else:
                    counts[int(row)] += len(new)
    except InputError:
        raise
    except Exception as error:
        ended = f"{type(error).__name__}: {message_of(error)}"
    else:
        ended = ""
    for row, count in counts.items():
        if count != request.count:
            errors.setdefault(row, ended or f"{count} of {plural(request.count, 'token')}")
    return errors


def scheduled_ns() -> tuple[int, int] | None:
    """How long the threads of this process and of its children ran, and waited for a core. None where nobody tells."""
    ran_ns = waited_ns = 0
    for process in _family(psutil.Process()):
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = map(int, file.read_text(encoding="ascii").split())
                ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return (ran_ns, waited_ns) if ran_ns else None


def waited_ratio(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The share of their time that threads waited for a core. A thread that has ended since is left out."""
    if before is None or after is None:
        return None
    ran_ns, waited_ns = (max(new - old, 0) for old, new in zip(before, after, strict=True))
    return waited_ns / (ran_ns + waited_ns) if ran_ns else None


def _whole(token: Any, row: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise InputError(f"generate gives whole numbers as tokens; found {value_text(token)} for row {row}") from None


def _decode_steps(stamps_ns: Mapping[int, list[int]], steps: Mapping[int, int]) -> int:
    """Steps after the first of the row that began last: no other row's prefill is part of them."""
    begun = {row: stamps[0] for row, stamps in stamps_ns.items() if stamps}
    return max((steps[row] - 1 for row, first in begun.items() if first == max(begun.values())), default=0)


def _failure(error: BaseException, stage: Stage) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)]
    # Errors of this package name the user's line themselves.
    told = own and not isinstance(error, CudagraphError)
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if told else ""
    return {
        "stage": stage,
        "error": f"{type(error).__name__}: {message_of(error)}{place}",
        "mistake": message_of(error) if isinstance(error, InputError) else None,
    }


def resident_bytes() -> int:
    """Of this process and of those that it started. Shared memory counts in each."""
    found = 0
    for process in _family(psutil.Process()):
        with contextlib.suppress(psutil.Error):
            found += process.memory_info().rss
    return found


def _family(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    yield from process.children(recursive=True)


def used_device_bytes() -> int | None:
    """The used memory of all GPUs, also by other processes. None without NVML."""
    nvml = start_nvml()
    if isinstance(nvml, str):
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except nvml.NVMLError:
        return None
    finally:
        stop_nvml(nvml)


def main(folder: str) -> None:
    """Run the mode of a folder."""
    end_with_parent()
    ModeProcess(Path(folder)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Whatever still runs has nothing more to tell, and must not keep the test waiting.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

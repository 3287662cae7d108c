"""One cell: one model at one batch size, all its arms, the proof that they agree."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_evidence.arms import Call, NotAvailable, Workplace, make_arm
from benchmarks.gpu_evidence.loop import Readings, interleave, latency, speedup
from benchmarks.models.definitions import Scale, build

from pytest_cudagraph.check import check_replays
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.stats import summaries
from pytest_cudagraph.units import to_seconds
from pytest_cudagraph.values import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """What all cells of a run share."""

    backend: Backend
    scale: Scale
    cache_folder: Path
    sample_s: float
    """Seconds of sampling per cell of three arms; more arms get more."""
    compile_limit_s: float
    """Of one arm at one batch size."""
    ends_s: float
    """When all that is timed must have ended, on the performance counter."""
    seed: int = 20

    @property
    def compile_share_s(self) -> float:
        """What a compiler may take now: the limit, or a third of the time left, since three arms of a cell compile."""
        return max(1.0, min(self.compile_limit_s, (self.ends_s - time.perf_counter()) / 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model, a batch size, and which arms."""

    model: str
    batch_size: int
    arms: Sequence[str]

    def __str__(self) -> str:
        return f"{self.model} at batch {self.batch_size} ({len(self.arms)} arms)"


def measure_cell(lab: Lab, cell: Cell) -> dict[str, Any]:
    """Everything known of one cell, for the file. An arm that cannot be made is a reason in its place."""
    began_s = time.perf_counter()
    torch.manual_seed(lab.seed)
    subject = build(cell.model, lab.scale, cell.batch_size)
    found: dict[str, Any] = {
        "model": cell.model,
        "batch_size": cell.batch_size,
        "dtype": subject.dtype,
        "parameters": subject.parameters,
    }
    _load_compilers(cell)
    opened = Workplace.opened(
        lab.backend,
        subject,
        cell.batch_size,
        cache_folder=lab.cache_folder,
        compile_limit_s=lab.compile_share_s,
    )
    try:
        with opened as at, lab.backend.running():
            found |= _measured(lab, cell, at)
    finally:
        not_cleaned_up = _clean_up(cell, lab.backend.kind)
    found |= {"not_cleaned_up": not_cleaned_up} if not_cleaned_up else {}
    return {**found, "seconds": round(time.perf_counter() - began_s, 2)}


def _measured(lab: Lab, cell: Cell, at: Workplace) -> dict[str, Any]:
    calls, missing = _made(cell.arms, at)
    rewind = at.rewinder()
    differences = _differences(calls, missing, at)
    at.before.restore()
    readings = _interleaved(lab, calls, missing, rewind)
    arms: dict[str, Any] = {name: {"reason": reason} for name, reason in missing.items()}
    for name, samples_ns in readings.samples_ns.items():
        arms[name] = {**latency(samples_ns), "largest_difference": differences[name]} | _of_graph(name, at)
    if "replay" in calls:
        arms["replay"]["device_ns"] = _device_ns(lab, calls["replay"], rewind)
    at.before.restore()
    return {
        "arms": {name: arms[name] for name in cell.arms},
        "speedup": speedup(readings.blocks) if "replay" in calls else None,
        "check": _check(lab, at),
        "keeps_state": rewind is not None,
        "measure_seconds": round(to_seconds(readings.measure_ns), 3),
    }


def _made(names: Sequence[str], at: Workplace) -> tuple[dict[str, Call], dict[str, str]]:
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            calls[name] = make_arm(name, at)
        except NotAvailable as reason:
            missing[name] = str(reason)
        except Exception as error:  # whatever a compiler or CUDA may raise: the other arms are still worth having
            missing[name] = reason_of(error)
    return calls, missing


def reason_of(error: BaseException) -> str:
    """The first line of an error, with its class, short enough for a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


def _differences(calls: dict[str, Call], missing: dict[str, str], at: Workplace) -> dict[str, float]:
    """The largest difference of each arm's output from eager's, relative to eager's largest value.

    An arm that fails in this call is ``missing`` from then on, and no more among the ``calls``.
    """
    at.before.restore()
    right = calls["eager"]().float().clone()
    largest = float(right.abs().max()) or 1.0
    found: dict[str, float] = {}
    for name, call in list(calls.items()):
        at.before.restore()
        try:
            found[name] = round(float((call().float() - right).abs().max()) / largest, 8)
        except Exception as error:  # graphs of other makes may fail when they are called: the other arms go on
            if name == "eager":
                raise
            missing[name] = reason_of(error)
            del calls[name]
    return found


_JUDGED = ("eager", "replay")


def _interleaved(lab: Lab, calls: dict[str, Call], missing: dict[str, str], rewind: Call | None) -> Readings:
    """All arms in one loop; where one of them breaks it, eager and replay alone, and the others are ``missing``."""

    def sampled() -> Readings:
        return interleave(
            calls,
            budget_s=lab.sample_s * max(1.0, len(calls) / 3),
            synchronize=lab.backend.synchronize,
            seed=lab.seed,
            prepare=rewind,
        )

    try:
        return sampled()
    except Exception as error:  # of an arm, who knows which: the two that matter are tried once more
        others = [name for name in calls if name not in _JUDGED]
        if not others:
            raise
        for name in others:
            missing[name] = f"while arms were timed together: {reason_of(error)}"
            del calls[name]
        return sampled()


_EVENT_SAMPLES = 9


def _device_ns(lab: Lab, replay: Call, rewind: Call | None) -> float | None:
    """The replay by the device's own events, which also tell where no profiler may look; None on the twin."""
    timer = lab.backend.event_timer()
    if timer is None:
        return None
    samples_ns = []
    for _ in range(_EVENT_SAMPLES):
        if rewind is not None:
            rewind()
        samples_ns.append(timer.time_ns(replay))
    return round(summaries.median(samples_ns), 1)


def _of_graph(name: str, at: Workplace) -> dict[str, Any]:
    if name not in at.graphs:
        return {}
    receipt = at.graphs[name].receipt
    compile_ns = at.compile_ns.get(name)
    return {
        "capture_seconds": round(to_seconds(receipt.capture_ns), 4),
        "memory_bytes": receipt.memory_bytes,
        "kernels": receipt.kernels,
        "compile_seconds": None if compile_ns is None else round(to_seconds(compile_ns), 2),
    }


def _check(lab: Lab, at: Workplace) -> str:
    """``agrees``, or how the replay differs from eager on fresh inputs."""
    if "replay" not in at.graphs:
        return "no graph"
    try:
        answer = check_replays(
            {at.batch_size: at.graphs["replay"]},
            lambda _: at.subject.model,
            {at.batch_size: at.example},
            model=at.subject.model,
            backend=lab.backend,
            seed=lab.seed,
        )[at.batch_size]
    except Exception as error:  # a finding for the file, no reason to lose the cell's timings
        return reason_of(error)
    return "agrees" if isinstance(answer, Agreement) else f"{answer.where}: {answer.message}"


_COMPILING = ("inductor-replay", "aot-replay", "reduce-overhead")


def _load_compilers(cell: Cell) -> None:
    """Before any time limit: an import that is stopped half-way leaves a module that is broken for good."""
    if any(arm in _COMPILING for arm in cell.arms):
        with contextlib.suppress(Exception):  # each arm that needs them says what is wrong with them
            importlib.import_module("torch._dynamo")
            importlib.import_module("torch._inductor.compile_fx")


def _clean_up(cell: Cell, kind: str) -> str:
    """Compiled code and graph trees hold on to models and memory for as long as the process lives.

    Says what went wrong, empty if nothing did: the figures of the cell are there all the same.
    """
    try:
        if any(arm in _COMPILING for arm in cell.arms):
            torch._dynamo.reset()
        if kind == "cuda":
            torch.cuda.empty_cache()
    except Exception as error:  # of a compiler stopped half-way, or of a GPU that an arm has left unusable
        return reason_of(error)
    return ""

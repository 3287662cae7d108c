"""Checks beyond ordinary inputs: edge cases, rows beside other rows, parameters changed in place, first calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.check.batch_check import BatchCheck
from pytest_cudagraph.check.check_case import CheckCase, CheckedCall
from pytest_cudagraph.check.compare import rounding_limit, spread
from pytest_cudagraph.check.differences import has_same_outputs, moved_text
from pytest_cudagraph.check.initial_state import CallResult, Change
from pytest_cudagraph.check.weight_change import changed
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.values import Disagreement


def check_adversarial_inputs(check: BatchCheck) -> None:
    """Replay on zeros, large values, rows in another order and a row of NaN, if eager accepts them.

    Replays of compiled code are compared with the compiled code itself: compilers round large values differently.
    """
    if check.agreed is None:
        return
    seed, refused, tried = check.agreed.seed, [], False
    for kind, example in _adversarial_inputs(check.case, seed):
        expected = _expected(check, example, seed)
        if expected is None:
            refused.append(kind)
            continue
        if not check.adversarial_trial(kind, example, seed, *expected):
            return
        tried = True
    if refused and not tried:
        check.note(f"eager takes none of the adversarial inputs ({', '.join(refused)}): only ordinary ones were tried")


def _adversarial_inputs(case: CheckCase, seed: int) -> Iterator[tuple[str, Example]]:
    ordinary = inputs.fresh(case.example, seed)
    for kind, example in inputs.adversaries(case.example, case.dims, seed):
        if not inputs.has_same_inputs(example, ordinary):
            yield kind, example


def _expected(check: BatchCheck, example: Example, seed: int) -> tuple[CallResult, Mapping[str, float]] | None:
    """The result to compare replay with, and its noise. None if eager refuses the inputs or is not repeatable."""
    comparison = check.case.comparison
    try:
        expected = _run_captured(check.case, example, seed)
        again = expected if check.is_repeatable else _run_captured(check.case, example, seed)
    # The user's model may raise anything: it does not accept these inputs.
    except Exception:
        return None
    if comparison.unrepeatable(expected, again) is not None:
        return None
    return expected, comparison.noise_of(expected, again)


def _run_captured(case: CheckCase, example: Example, seed: int) -> CallResult:
    """Run eager, then the code that was captured if it is compiled."""
    with _silent_warnings():
        with TrapGuard() if case.start.may_trap else nullcontext():
            eager = case.start.run(case.eager, example, seed)
        return case.start.run(case.captured, example, seed) if case.is_compiled else eager


@contextmanager
def _silent_warnings() -> Iterator[None]:
    """Hide the model's warnings about inputs that the user did not give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def note_mixed_rows(check: BatchCheck, wider: BatchCheck) -> None:
    """Replay the wider graph on this batch's inputs beside other rows. Note it if the results of these rows change.

    Not tried if the model draws random numbers, which differ for each row, or takes objects as arguments.
    """
    agreed, other = check.agreed, wider.agreed
    if agreed is None or other is None:
        return
    if agreed.eager.random or opaque_arguments([agreed.example]) or agreed.eager.structure != other.eager.structure:
        return
    beside = inputs.beside(agreed.example, other.example, check.case.dims)
    if check.case.example.drawing is not None:  # rows of two draws may not go together, such as slots
        beside = inputs.fresh(wider.case.example, agreed.seed)
    replay = wider.replay(beside, agreed.seed)
    for where, alone in agreed.eager.outputs.items():
        gap = _row_gap(check.case, alone, replay.outputs[where])
        if gap:
            check.note(
                f"rows are not independent: {where} differs by {gap:.3g} in a graph of batch {wider.case.batch_size}, "
                "beside other rows. Padding would change results (GraphRunner runs such batches eagerly)"
            )
            return


def _row_gap(case: CheckCase, alone: Any, among: Any) -> float:
    """The largest difference between an output and the same rows among others. 0 if rounding explains it."""
    if not isinstance(alone, torch.Tensor) or not isinstance(among, torch.Tensor) or alone.ndim != among.ndim:
        return 0.0
    rows = among
    for dim, size in enumerate(alone.shape):
        rows = rows.narrow(dim, 0, size) if size < among.shape[dim] else rows
    if rows.shape != alone.shape or rows.dtype != alone.dtype:
        return 0.0
    gap = spread(alone, rows.contiguous())
    return gap if gap > rounding_limit(alone, case.comparison.tolerance) else 0.0


_OWN_WEIGHTS = (
    "the compiled code holds weights of its own (a package, or frozen weights): it does not see an in-place change of "
    "the eager model's parameters"
)


def check_weight_update(check: BatchCheck) -> None:
    """Change all parameters and moved state in place, each element by another factor, and compare replay with eager.

    Not tried if eager's result does not depend on them. Compiled code with its own weights gets a note.
    """
    agreed, case = check.agreed, check.case
    weights = case.start.weights(case.moved)
    if agreed is None or not weights:
        return
    change = partial(changed, weights.values())
    eager = _changed_eager(case, agreed, change)
    if eager is None or has_same_outputs(eager, agreed.eager):
        return
    expected = eager
    if case.is_compiled:
        expected = case.start.run(case.captured, agreed.example, agreed.seed, change=change)
        if not eager.random and _has_own_weights(case, agreed, eager, expected):
            check.note(_OWN_WEIGHTS)
    difference = _changed_difference(check, agreed, expected, change)
    if difference is not None:
        check.end_with(_as_stale_weight(difference, _stale_weights(check, agreed, weights), case.moved))


def _changed_eager(case: CheckCase, agreed: CheckedCall, change: Change) -> CallResult | None:
    try:
        return case.start.run(case.eager, agreed.example, agreed.seed, change=change)
    # The user's model may raise anything with other weights. That says nothing about its graph.
    except Exception:
        return None


def _has_own_weights(case: CheckCase, agreed: CheckedCall, eager: CallResult, compiled: CallResult) -> bool:
    """Whether compiled code returns the same as before the change, or differs from eager by more than rounding."""
    return has_same_outputs(compiled, agreed.replay) or case.comparison.unrepeatable(eager, compiled) is not None


def _changed_difference(
    check: BatchCheck, agreed: CheckedCall, expected: CallResult, change: Change
) -> Disagreement | None:
    replay = check.replay(agreed.example, agreed.seed, change=change)
    return check.case.comparison.first_difference(expected, replay, agreed.noise)


def _stale_weights(check: BatchCheck, agreed: CheckedCall, weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The first weight whose change alone makes replay differ. All of them if no single one does."""
    for name, tensor in weights.items():
        change = partial(changed, [tensor])
        expected = _changed_eager(check.case, agreed, change)
        if expected is not None and _changed_difference(check, agreed, expected, change) is not None:
            return (name,)
    return tuple(weights)


def _as_stale_weight(difference: Disagreement, names: tuple[str, ...], moved: tuple[str, ...]) -> Disagreement:
    moved = tuple(name for name in names if name in moved)
    copied = "the graph reads a copy from before the change. Compute from the parameter itself in each call"
    return replace(
        difference,
        message="eager follows an in-place change of the model's state, replay does not",
        evidence=(
            f"changed: {', '.join(names)}",
            difference.message,
            *difference.evidence,
            moved_text(moved) if moved else copied,
        ),
        finding_id=difference.finding_id or ("rebinds-state" if moved else "foreign-tensor"),
    )


def check_first_call(check: BatchCheck) -> None:
    """Compare eager's first call at this batch size with its later ones, where it makes tensors anew.

    A replay does what later calls do.
    """
    agreed, case = check.agreed, check.case
    if agreed is None:
        return
    for other in case.others:
        first = other.run(case.eager, agreed.example, agreed.seed)
        found = case.comparison.unrepeatable(first, agreed.eager)
        if found is not None:
            check.end_with(_as_first_call(found, first), other)
            return
    if case.made:
        check.note(
            f"a first call at this batch size makes {', '.join(case.made)} anew. A graph reads what was there at its "
            "capture: code that captures several sizes must keep that alive"
        )


def _as_first_call(found: Disagreement, first: CallResult) -> Disagreement:
    made = ", ".join(sorted(first.rebound))
    return replace(
        found,
        message="a first call at this batch size computes something else than the next, which a replay repeats",
        evidence=(found.evidence[0], *([f"the first call makes anew: {made}"] if made else [])),
        finding_id="rebinds-state",
        assigned=first.assigned,
    )

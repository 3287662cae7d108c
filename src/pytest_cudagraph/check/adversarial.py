"""Checks beyond the ordinary replay: edge-case inputs, rows beside other rows, a changed weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.check import differences
from pytest_cudagraph.check.batch_check import BatchCheck, CheckedCall, has_same_inputs
from pytest_cudagraph.check.compare import TensorDifference, rounding_limit, spread
from pytest_cudagraph.check.initial_state import CallResult
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments


def check_adversarial_inputs(batch_check: BatchCheck) -> None:
    """Replay on zeros, on large values, on rows in another order and on a row of NaN, each as far as eager takes it.

    Compiled code is held against itself here: how large values and ties round is the compiler's affair, and the
    ordinary inputs have been held against eager.
    """
    asked = batch_check.last
    refused: list[str] = []
    for name, example in _worth_trying(batch_check, asked):
        if batch_check.has_ended or asked is None:
            return
        question = _question(batch_check, example, asked.seed)
        if question is None:
            refused.append(name)
            continue
        difference = batch_check.replayed(question, is_ordinary=False)
        if difference is not None:
            told = replace(difference, evidence=(*difference.evidence, f"the inputs: {name}"))
            batch_check.end_with(told)
        batch_check.adversaries.append(name)
    if refused and not batch_check.adversaries:
        batch_check.note(
            f"eager takes none of the adversarial inputs ({', '.join(refused)}): ordinary ones only were tried"
        )


def _worth_trying(batch_check: BatchCheck, asked: CheckedCall | None) -> Iterator[tuple[str, Example]]:
    if asked is None or batch_check.has_ended:
        return
    plain = inputs.fresh(batch_check.check_case.example, asked.seed)
    for name, example in inputs.adversaries(batch_check.check_case.example, batch_check.check_case.dims, asked.seed):
        if not has_same_inputs(example, plain):
            yield name, example


def _question(batch_check: BatchCheck, example: Example, seed: int) -> CheckedCall | None:
    """The question with the answer that replay is held against; None where there is none to rely on."""
    try:
        expected = _expected(batch_check, example, seed)
        again = expected if batch_check.is_repeatable else _expected(batch_check, example, seed)
    # Whatever the user's model raises here: it refuses these inputs, and nobody promised that it would take them.
    except Exception:
        return None
    before, tolerance = batch_check.check_case.start.tensors, batch_check.check_case.tolerance
    if differences.unrepeatable(expected, again, before, tolerance) is not None:
        return None
    noise = differences.noise_of(expected, again, before)
    return CheckedCall(example=example, seed=seed, eager=expected, replay=expected, noise=noise)


def _expected(batch_check: BatchCheck, example: Example, seed: int) -> CallResult:
    check_case = batch_check.check_case
    with _unheard():
        with TrapGuard() if check_case.start.traps else nullcontext():
            eager = check_case.start.answer(check_case.eager, example, seed)
        return check_case.start.answer(check_case.captured, example, seed) if batch_check.is_compiled else eager


@contextmanager
def _unheard() -> Iterator[None]:
    """What the model warns of on inputs that the user never gave is not his affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def note_mixed_rows(batch_check: BatchCheck, wider: BatchCheck) -> None:
    """Replay the wider graph on this batch's inputs beside other rows; note it where these rows then differ.

    Not tried on models that draw random numbers, which each row draws for itself, nor with objects as arguments.
    """
    asked, other = batch_check.last, wider.last
    if asked is None or other is None or batch_check.has_ended or wider.has_ended:
        return
    if asked.eager.random or opaque_arguments([asked.example]) or asked.eager.structure != other.eager.structure:
        return
    mixed = inputs.beside(asked.example, other.example, batch_check.check_case.dims)
    start, graph = batch_check.check_case.start, wider.check_case.graph
    start.poison(graph)
    replay = wider.launched(lambda: start.answer(graph, mixed, asked.seed))
    for where, alone in asked.eager.outputs.items():
        gap = _gap(batch_check, alone, replay.outputs[where])
        if gap:
            rows = f"batch {wider.check_case.batch_size}, beside other rows"
            batch_check.note(
                f"rows are not independent: {where} differs by {gap:.3g} in a graph of {rows}; padding would change "
                "answers (GraphRunner runs such batches eagerly)"
            )
            return


def _gap(batch_check: BatchCheck, alone: Any, among: Any) -> float:
    """By how much an output differs from its rows among others, where that is more than rounding; else 0."""
    if not isinstance(alone, torch.Tensor) or not isinstance(among, torch.Tensor) or alone.ndim != among.ndim:
        return 0.0
    mine = among
    for dim, rows in enumerate(alone.shape):
        if rows != among.shape[dim]:
            mine = mine.narrow(dim, 0, rows) if rows < among.shape[dim] else mine
    if mine.shape != alone.shape or mine.dtype != alone.dtype:
        return 0.0
    gap = spread(alone, mine.contiguous())
    return gap if gap > rounding_limit(alone, batch_check.check_case.tolerance) else 0.0


_CHANGE_RATIO = 0.05
"""Far above the rounding of any dtype, and still within what a trained weight may become."""

_FROM_ZERO = 0.01
"""What takes the place of 0, which no factor changes: gammas and biases start there."""

_OWN_WEIGHTS = (
    "the compiled code holds weights of its own (a package, or frozen weights): an in-place change of the eager "
    "model's parameters is not seen"
)


def check_weight_update(batch_check: BatchCheck) -> None:
    """Change all parameters in place, element by element, and see that replay answers as eager then does.

    Says nothing where eager's answer does not depend on them. Compiled code that keeps weights of its own gets a note.
    """
    weights, asked = batch_check.check_case.start.weights(), batch_check.last
    if not weights or asked is None or batch_check.has_ended:
        return
    change = changed(weights)
    eager = _eager(batch_check, asked, change)
    if eager is None or differences.has_same_outputs(eager, asked.eager):
        return
    expected = eager
    if batch_check.is_compiled:
        expected = _asked(batch_check, batch_check.check_case.captured, asked, change)
        if not eager.random and _keeps_its_own(batch_check, asked, eager, expected):
            batch_check.note(_OWN_WEIGHTS)
    difference = _difference(batch_check, asked, expected, change)
    if difference is not None:
        batch_check.end_with(_told(difference, _stale(batch_check, asked, weights)))


def changed(weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """What changes these tensors in place: each element by another factor near 1, zeros to small numbers."""

    def change() -> None:
        for tensor in weights.values():
            wave = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32).cos().view(tensor.shape)
            moved = torch.where(tensor == 0, _FROM_ZERO * wave, tensor * (1 + _CHANGE_RATIO * wave))
            tensor.copy_(moved)

    return change


def _eager(batch_check: BatchCheck, asked: CheckedCall, change: Callable[[], None]) -> CallResult | None:
    try:
        return _asked(batch_check, batch_check.check_case.eager, asked, change)
    # Whatever the user's model raises with other weights says nothing of its graph.
    except Exception:
        return None


def _asked(
    batch_check: BatchCheck, call: Callable[..., object], asked: CheckedCall, change: Callable[[], None]
) -> CallResult:
    return batch_check.check_case.start.answer(call, asked.example, asked.seed, change=change)


def _keeps_its_own(batch_check: BatchCheck, asked: CheckedCall, eager: CallResult, compiled: CallResult) -> bool:
    """Whether compiled code answers as before the change, or otherwise than eager by more than rounding."""
    if differences.has_same_outputs(compiled, asked.replay):
        return True
    return differences.unrepeatable(eager, compiled, {}, batch_check.check_case.tolerance) is not None


def _difference(
    batch_check: BatchCheck, asked: CheckedCall, expected: CallResult, change: Callable[[], None]
) -> TensorDifference | None:
    start, graph = batch_check.check_case.start, batch_check.check_case.graph
    start.poison(graph)
    replay = batch_check.launched(lambda: _asked(batch_check, graph, asked, change))
    return differences.first_difference(expected, replay, {}, batch_check.check_case.tolerance, asked.noise)


def _stale(batch_check: BatchCheck, asked: CheckedCall, weights: Mapping[str, torch.Tensor]) -> str:
    """The first weight whose change alone parts replay from eager; all of them where none does."""
    for name, tensor in weights.items():
        change = changed({name: tensor})
        expected = _eager(batch_check, asked, change)
        if expected is not None and _difference(batch_check, asked, expected, change) is not None:
            return name
    return ", ".join(weights)


def _told(difference: TensorDifference, names: str) -> TensorDifference:
    return replace(
        difference,
        message="replay does not follow a parameter that is changed in place, as eager does",
        evidence=(
            f"changed: {names}",
            difference.message,
            *difference.evidence,
            "the graph reads a copy of it, made once; compute from the parameter itself in each call",
        ),
        finding_id=difference.finding_id or "foreign-tensor",
    )

"""Inputs that nobody gave as an example, and that eager takes: a graph has to take them as well."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from pytest_cudagraph import inputs
from pytest_cudagraph.backends.traps import TrapGuard
from pytest_cudagraph.check import answers
from pytest_cudagraph.check.course import Asked, Course, has_same_inputs
from pytest_cudagraph.check.start import Answer
from pytest_cudagraph.inputs import Example


def face_adversity(course: Course) -> None:
    """Replay on zeros, on large values, on rows in another order and on a row of NaN, each as far as eager takes it.

    Compiled code is held against itself here: how large values and ties round is the compiler's affair, and the
    ordinary inputs have been held against eager.
    """
    asked = course.last
    refused: list[str] = []
    for name, example in _worth_trying(course, asked):
        if course.has_ended or asked is None:
            return
        question = _question(course, example, asked.seed)
        if question is None:
            refused.append(name)
            continue
        difference = course.replayed(question, is_ordinary=False)
        if difference is not None:
            told = replace(difference, evidence=(*difference.evidence, f"the inputs: {name}"))
            course.end_with(told)
        course.adversaries.append(name)
    if refused and not course.adversaries:
        course.note(f"eager takes none of the adversarial inputs ({', '.join(refused)}): ordinary ones only were tried")


def _worth_trying(course: Course, asked: Asked | None) -> Iterator[tuple[str, Example]]:
    if asked is None or course.has_ended:
        return
    plain = inputs.fresh(course.entrant.example, asked.seed)
    for name, example in inputs.adversaries(course.entrant.example, course.entrant.dims, asked.seed):
        if not has_same_inputs(example, plain):
            yield name, example


def _question(course: Course, example: Example, seed: int) -> Asked | None:
    """The question with the answer that replay is held against; None where there is none to rely on."""
    try:
        expected = _expected(course, example, seed)
        again = expected if course.is_repeatable else _expected(course, example, seed)
    # Whatever the user's model raises here: it refuses these inputs, and nobody promised that it would take them.
    except Exception:
        return None
    before, tolerance = course.entrant.start.tensors, course.entrant.tolerance
    if answers.unrepeatable(expected, again, before, tolerance) is not None:
        return None
    noise = answers.noise_of(expected, again, before)
    return Asked(example=example, seed=seed, eager=expected, replay=expected, noise=noise)


def _expected(course: Course, example: Example, seed: int) -> Answer:
    entrant = course.entrant
    with _unheard():
        with TrapGuard() if entrant.start.traps else nullcontext():
            eager = entrant.start.answer(entrant.eager, example, seed)
        return entrant.start.answer(entrant.captured, example, seed) if course.is_compiled else eager


@contextmanager
def _unheard() -> Iterator[None]:
    """What the model warns of on inputs that the user never gave is not his affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

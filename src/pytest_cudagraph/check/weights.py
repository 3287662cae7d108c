"""A parameter changed in place must change the answer of a replay as it changes eager's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from pytest_cudagraph.check import answers
from pytest_cudagraph.check.compare import Difference
from pytest_cudagraph.check.course import Asked, Course
from pytest_cudagraph.check.start import Answer

_CHANGE_RATIO = 0.05
"""Far above the rounding of any dtype, and still within what a trained weight may become."""

_FROM_ZERO = 0.01
"""What takes the place of 0, which no factor changes: gammas and biases start there."""

_OWN_WEIGHTS = (
    "the compiled code holds weights of its own (a package, or frozen weights): an in-place change of the eager "
    "model's parameters is not seen"
)


def require_effect(course: Course) -> None:
    """Change all parameters in place, element by element, and see that replay answers as eager then does.

    Says nothing where eager's answer does not depend on them. Compiled code that keeps weights of its own gets a note.
    """
    weights, asked = course.entrant.start.weights(), course.last
    if not weights or asked is None or course.has_ended:
        return
    change = changed(weights)
    eager = _eager(course, asked, change)
    if eager is None or answers.has_same_outputs(eager, asked.eager):
        return
    expected = eager
    if course.is_compiled:
        expected = _asked(course, course.entrant.captured, asked, change)
        if not eager.random and _keeps_its_own(course, asked, eager, expected):
            course.note(_OWN_WEIGHTS)
    difference = _difference(course, asked, expected, change)
    if difference is not None:
        course.end_with(_told(difference, _stale(course, asked, weights)))


def changed(weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """What changes these tensors in place: each element by another factor near 1, zeros to small numbers."""

    def change() -> None:
        for tensor in weights.values():
            wave = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32).cos().view(tensor.shape)
            moved = torch.where(tensor == 0, _FROM_ZERO * wave, tensor * (1 + _CHANGE_RATIO * wave))
            tensor.copy_(moved)

    return change


def _eager(course: Course, asked: Asked, change: Callable[[], None]) -> Answer | None:
    try:
        return _asked(course, course.entrant.eager, asked, change)
    # Whatever the user's model raises with other weights says nothing of its graph.
    except Exception:
        return None


def _asked(course: Course, call: Callable[..., object], asked: Asked, change: Callable[[], None]) -> Answer:
    return course.entrant.start.answer(call, asked.example, asked.seed, change=change)


def _keeps_its_own(course: Course, asked: Asked, eager: Answer, compiled: Answer) -> bool:
    """Whether compiled code answers as before the change, or otherwise than eager by more than rounding."""
    if answers.has_same_outputs(compiled, asked.replay):
        return True
    return answers.unrepeatable(eager, compiled, {}, course.entrant.tolerance) is not None


def _difference(course: Course, asked: Asked, expected: Answer, change: Callable[[], None]) -> Difference | None:
    start, graph = course.entrant.start, course.entrant.graph
    start.poison(graph)
    replay = course.launched(lambda: _asked(course, graph, asked, change))
    return answers.first_difference(expected, replay, {}, course.entrant.tolerance, asked.noise)


def _stale(course: Course, asked: Asked, weights: Mapping[str, torch.Tensor]) -> str:
    """The first weight whose change alone parts replay from eager; all of them where none does."""
    for name, tensor in weights.items():
        change = changed({name: tensor})
        expected = _eager(course, asked, change)
        if expected is not None and _difference(course, asked, expected, change) is not None:
            return name
    return ", ".join(weights)


def _told(difference: Difference, names: str) -> Difference:
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

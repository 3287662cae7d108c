"""Do rows depend on the rows beside them: then padding a batch to the size of a graph changes its answers."""

from __future__ import annotations

from typing import Any

import torch

from pytest_cudagraph import inputs
from pytest_cudagraph.check.compare import rounding_limit, spread
from pytest_cudagraph.check.course import Course
from pytest_cudagraph.inputs.objects import opaque_arguments


def note_mixed_rows(course: Course, wider: Course) -> None:
    """Replay the wider graph on this batch's inputs beside other rows; note it where these rows then differ.

    Not tried on models that draw random numbers, which each row draws for itself, nor with objects as arguments.
    """
    asked, other = course.last, wider.last
    if asked is None or other is None or course.has_ended or wider.has_ended:
        return
    if asked.eager.random or opaque_arguments([asked.example]) or asked.eager.structure != other.eager.structure:
        return
    mixed = inputs.beside(asked.example, other.example, course.entrant.dims)
    start, graph = course.entrant.start, wider.entrant.graph
    start.poison(graph)
    replay = wider.launched(lambda: start.answer(graph, mixed, asked.seed))
    for where, alone in asked.eager.outputs.items():
        gap = _gap(course, alone, replay.outputs[where])
        if gap:
            rows = f"batch {wider.entrant.batch_size}, beside other rows"
            course.note(
                f"rows are not independent: {where} differs by {gap:.3g} in a graph of {rows}; padding would change "
                "answers (GraphRunner runs such batches eagerly)"
            )
            return


def _gap(course: Course, alone: Any, among: Any) -> float:
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
    return gap if gap > rounding_limit(alone, course.entrant.tolerance) else 0.0

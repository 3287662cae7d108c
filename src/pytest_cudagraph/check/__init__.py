"""Does replay compute what eager computes: outputs and state, on fresh inputs, in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.course import Course, Entrant
from pytest_cudagraph.check.start import Start
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.values import Agreement, Disagreement

__all__ = ["check_replays"]

# The second round sees what the first left in the buffers, after every sibling graph has replayed.
_ROUNDS = 2


def check_replays(
    graphs: Mapping[int, CapturedGraph],
    eager_for: Callable[[int], Model],
    examples: Mapping[int, Example],
    *,
    model: Model,
    backend: Backend,
    seed: int,
    rtol: float | None = None,
    atol: float | None = None,
    captured_at: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[int, Agreement | Disagreement]:
    """Replay every graph against eager, twice, each time on new inputs with poisoned outputs.

    Eager (``eager_for``) runs twice from the same state, inputs and seed: what it does not repeat is not held against
    the graph. ``torch.testing.assert_close`` judges outputs and the state of ``model``, NaN equal to NaN; ``model`` and
    generators are afterwards as they were. ``captured_at``, where state lay at capture, explains differences. Raises
    :class:`~pytest_cudagraph.errors.InputError` when eager cannot take fresh inputs and
    :class:`~pytest_cudagraph.errors.CudagraphError` when a replay raises or the state cannot be brought back.
    """
    with Start(model, examples.values(), backend) as start:
        moved = start.moved_since(captured_at or {})
        courses = {
            batch_size: Course(
                Entrant(
                    batch_size=batch_size,
                    graph=graph,
                    eager=eager_for(batch_size),
                    example=examples[batch_size],
                    start=start,
                    tolerance=Tolerance(rtol=rtol, atol=atol),
                    moved=moved,
                )
            )
            for batch_size, graph in graphs.items()
        }
        for batch_size, trial_seed in _trials(sorted(graphs), seed):
            progress(f"check batch {batch_size}")
            courses[batch_size].trial(trial_seed)
    return {batch_size: course.result() for batch_size, course in courses.items()}


def _trials(batch_sizes: list[int], seed: int) -> Iterator[tuple[int, int]]:
    """``(batch size, seed of the trial)``: every size once a round, in an order of its own each round."""
    generator = random.Random(seed)
    for _ in range(_ROUNDS):
        for batch_size in generator.sample(batch_sizes, len(batch_sizes)):
            yield batch_size, generator.getrandbits(31)

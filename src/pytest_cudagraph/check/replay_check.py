"""Does replay compute what eager computes: outputs and state, on fresh inputs, in shuffled order."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from pytest_cudagraph.check.adversarial import check_adversarial_inputs, check_weight_update, note_mixed_rows
from pytest_cudagraph.check.batch_check import BatchCheck, CheckCase
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.initial_state import InitialState
from pytest_cudagraph.inputs import Example, row_dims
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.values import Agreement, Disagreement

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
    captured_for: Callable[[int], Model] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[int, Agreement | Disagreement]:
    """Replay every graph against eager, with poisoned outputs, on inputs that are new each time.

    Two rounds of fresh inputs, then adversarial ones, parameters changed in place, rows beside other rows; at last the
    earlier answers again. Eager (``eager_for``) and replay begin from the same state, inputs and seed; what eager does
    not repeat is not held against the graph. ``torch.testing.assert_close`` judges outputs and state, NaN equal to NaN;
    ``model`` and generators are left as they were. ``captured_at``, where state lay at capture, explains differences;
    ``captured_for`` gives the compiled code that was captured. Raises :class:`~pytest_cudagraph.errors.InputError` when
    eager cannot take fresh inputs, :class:`~pytest_cudagraph.errors.CudagraphError` when a replay raises or the state
    cannot be brought back.
    """
    captured = captured_for or eager_for
    with InitialState(model, examples.values(), backend) as start:
        tolerance, moved = Tolerance(rtol=rtol, atol=atol), start.moved_since(captured_at or {})
        check_case = functools.partial(CheckCase, start=start, tolerance=tolerance, moved=moved)
        batch_checks: dict[int, BatchCheck] = {}
        for size, graph in graphs.items():
            example, dims = examples[size], row_dims(examples[size], size, _neighbour(examples, size))
            found = check_case(
                batch_size=size, graph=graph, eager=eager_for(size), captured=captured(size), example=example, dims=dims
            )
            batch_checks[size] = BatchCheck(found)
        _run(batch_checks, random.Random(seed), progress)
    return {size: batch_check.result() for size, batch_check in batch_checks.items()}


def _run(batch_checks: Mapping[int, BatchCheck], generator: random.Random, progress: Callable[[str], None]) -> None:
    sizes = sorted(batch_checks)
    for batch_size, trial_seed in _trials(sizes, generator):
        progress(f"check batch {batch_size}")
        batch_checks[batch_size].trial(trial_seed)
    for batch_size in generator.sample(sizes, len(sizes)):
        progress(f"check batch {batch_size}: adversarial inputs, changed parameters")
        check_adversarial_inputs(batch_checks[batch_size])
        check_weight_update(batch_checks[batch_size])
    for smaller, wider in itertools.pairwise(sizes):
        note_mixed_rows(batch_checks[smaller], batch_checks[wider])
    for batch_size in generator.sample(sizes, len(sizes)):
        progress(f"check batch {batch_size}: earlier answers")
        batch_checks[batch_size].recheck_earlier()


def _trials(batch_sizes: list[int], generator: random.Random) -> Iterator[tuple[int, int]]:
    """``(batch size, seed of the trial)``: every size once a round, in an order of its own each round."""
    for _ in range(_ROUNDS):
        for batch_size in generator.sample(batch_sizes, len(batch_sizes)):
            yield batch_size, generator.getrandbits(31)


def _neighbour(examples: Mapping[int, Example], batch_size: int) -> Example | None:
    """An example of another batch size, which shows where the rows are."""
    return next((example for size, example in examples.items() if size != batch_size), None)

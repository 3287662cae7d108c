"""The check stage: replay every graph on new inputs and compare outputs and state with eager."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_cudagraph import inputs
from pytest_cudagraph.check.adversarial import (
    check_adversarial_inputs,
    check_first_call,
    check_weight_update,
    note_mixed_rows,
)
from pytest_cudagraph.check.batch_check import BatchCheck
from pytest_cudagraph.check.check_case import CheckCase
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.differences import ResultComparison
from pytest_cudagraph.check.initial_state import InitialState
from pytest_cudagraph.check.later_calls import check_later_calls
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.inputs import Example, row_dims
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.state import NO_CONSTANTS, Constants, SizeStates
from pytest_cudagraph.units import seconds_text, to_ns
from pytest_cudagraph.values import Agreement, Disagreement

# In the second round every graph finds its buffers as the other graphs left them.
_LEAST_ROUNDS = 2


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
    size_states: SizeStates | None = None,
    captured_for: Callable[[int], Model] | None = None,
    constants: Constants = NO_CONSTANTS,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[int, Agreement | Disagreement]:
    """Compare every graph with eager: outputs and state, from the same state, inputs and seed.

    Trials: two rounds of new inputs (or one for each of the user's examples), adversarial inputs, changed parameters,
    other rows, the earlier calls again. ``torch.testing.assert_close`` compares, NaN equal to NaN. Differences between
    two eager runs are tolerated. The state of ``model`` and the random generators are restored.

    ``captured_at`` holds the addresses of the state at capture, to explain differences. ``size_states`` are those of
    :class:`~pytest_cudagraph.capture.Captures`: then each graph is compared from the state of its capture, and a first
    call at its size with later ones. ``captured_for`` gives the compiled code of a graph. ``constants`` are compared by
    checksums, several times for each graph, and not copied.

    Raises :class:`~pytest_cudagraph.errors.InputError` if eager cannot take new inputs, and
    :class:`~pytest_cudagraph.errors.CudagraphError` if a replay raises or the state cannot be restored.
    """
    models = eager_for, captured_for or eager_for
    with InitialState(model, examples.values(), backend, constants) as start:
        captured_states = size_states if size_states is not None and size_states.is_current() else None
        cases = _cases(graphs, models, examples, start, captured_states, Tolerance(rtol=rtol, atol=atol))
        moved = () if captured_states else start.moved_since(captured_at or {})
        checks = {case.batch_size: BatchCheck(replace(case, moved=moved)) for case in cases}
        _run(checks, random.Random(seed), progress)
    return {size: check.result() for size, check in checks.items()}


def reset_difference(
    eager: Model,
    reset: Callable[[], object],
    example: Example,
    backend: Backend,
    *,
    batch_size: int,
    seed: int,
    constants: Constants = NO_CONSTANTS,
) -> str:
    """What a call after ``reset`` does otherwise than the call before it, in words. Empty if nothing differs.

    Compares outputs and the state that the calls leave with ``torch.testing.assert_close``. Differences between two
    equal calls are tolerated. The state and the random generators are restored.
    """
    errors: list[Exception] = []

    def second_call(*args: Any, **kwargs: Any) -> Any:
        random, inside = backend.rng_state(), inputs.clone(example)
        output = eager(*inside.args, **inside.kwargs)
        backend.set_rng_state(random)
        try:
            reset()
            return eager(*args, **kwargs)
        # The user's function may raise anything, and so may a call on a state that was not brought back.
        except Exception as error:
            errors.append(error)
            return output

    with InitialState(eager, [example], backend, constants) as start:
        once, again = (start.run(eager, example, seed) for _ in range(2))
        after = start.run(second_call, example, seed)
        comparison = ResultComparison(batch_size=batch_size, before=start.tensors, tolerance=Tolerance())
        difference = comparison.first_difference(once, after, comparison.noise_of(once, again))
    if errors:
        return f"it, or the call after it, raised {first_line(errors[0])}"
    replaced = sorted(after.rebound - once.rebound)
    if replaced:
        return f"it puts a new tensor in the place of {', '.join(replaced)}"
    return f"after it, a call gives another {difference.where}: {difference.message}" if difference else ""


def _cases(
    graphs: Mapping[int, CapturedGraph],
    models: tuple[Callable[[int], Model], Callable[[int], Model]],
    examples: Mapping[int, Example],
    start: InitialState,
    captured_states: SizeStates | None,
    tolerance: Tolerance,
) -> Iterator[CheckCase]:
    """What is compared at each size. ``models`` are eager, and what was captured, of each size."""
    eager_for, captured_for = models
    starts = {size: start.as_captured(captured_states.at(size)) for size in graphs} if captured_states else {}
    for size, graph in graphs.items():
        begin = starts.get(size, start)
        other = next((starts[size_of_other] for size_of_other in starts if size_of_other != size), start)
        yield CheckCase(
            graph=graph,
            eager=eager_for(size),
            captured=captured_for(size),
            example=examples[size],
            dims=row_dims(examples[size], size, _neighbour(examples, size)),
            start=begin,
            comparison=ResultComparison(batch_size=size, before=begin.tensors, tolerance=tolerance),
            others=(start, other) if captured_states else (),
            made=captured_states.made_at(size) if captured_states else (),
        )


def _run(checks: Mapping[int, BatchCheck], generator: random.Random, progress: Callable[[str], None]) -> None:
    sizes = sorted(checks)

    def shuffled() -> list[int]:
        return generator.sample(sizes, len(sizes))

    seeds: dict[int, int] = {}
    drawings = (check.case.example.drawing for check in checks.values())
    # Consecutive seeds give each of the user's examples.
    for number in range(max(_LEAST_ROUNDS, *(each.count if each else 0 for each in drawings))):
        for size in shuffled():
            seed = seeds.setdefault(size, generator.getrandbits(31)) + number
            if number >= _rounds_of(checks[size], is_first=size == sizes[0]):
                continue
            progress(f"check batch {size}")
            checks[size].trial(seed, repeats_elsewhere=size > sizes[0] and _has_repeated(checks.values()))
            checks[size].check_constants()
    left = _time_left(checks)
    for size in shuffled():
        progress(f"check batch {size}: adversarial inputs, changed parameters{left}")
        if size > sizes[0] and checks[size].is_slow:
            checks[size].note(
                f"calls take {seconds_text(to_ns(checks[size].eager_s))}: zeros, large values, other rows, NaN and "
                f"changed parameters were tried at batch {sizes[0]} only"
            )
        else:
            check_adversarial_inputs(checks[size])
            check_weight_update(checks[size])
        checks[size].check_constants()
        check_first_call(checks[size])
    for smaller, wider in itertools.pairwise(sizes):
        if smaller == sizes[0] or not checks[wider].is_slow:
            note_mixed_rows(checks[smaller], checks[wider])
    for size in shuffled():
        progress(f"check batch {size}: earlier calls")
        checks[size].recheck_earlier()
    # Python does not depend on the batch size.
    progress(f"check batch {sizes[0]}: later calls")
    check_later_calls(checks[sizes[0]])


def _rounds_of(check: BatchCheck, *, is_first: bool) -> int:
    """How many new inputs are tried. One at the larger sizes of a slow model, if the user gives no more."""
    drawing = check.case.example.drawing
    rounds = drawing.count if drawing else 0
    is_enough = not is_first and check.is_slow and check.is_tried_on_new_inputs
    return max(rounds, 1 if is_enough else _LEAST_ROUNDS)


def _has_repeated(checks: Iterable[BatchCheck]) -> bool:
    """Whether eager ran twice at some size, and always with the same bits."""
    every = list(checks)
    return any(check.has_repeated for check in every) and all(check.is_repeatable for check in every)


_CALLS_LEFT = 20
"""At the smallest size, after the trials of new inputs. At the others the earlier call is replayed again."""


def _time_left(checks: Mapping[int, BatchCheck]) -> str:
    """How long slow models still take. Empty for others."""
    smallest = min(checks)
    slow_s = sum(
        check.eager_s * (_CALLS_LEFT if size == smallest else 1) for size, check in checks.items() if check.is_slow
    )
    return f", some {seconds_text(to_ns(slow_s))} left" if slow_s else ""


def _neighbour(examples: Mapping[int, Example], batch_size: int) -> Example | None:
    """An example of another batch size. It shows which dimension holds the rows."""
    return next((example for size, example in examples.items() if size != batch_size), None)

"""Whether the user's ``reset`` brings the state back: a call after it must do what the call before it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_cudagraph import inputs
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.check.differences import ResultComparison
from pytest_cudagraph.check.initial_state import InitialState
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.state import NO_CONSTANTS, Constants


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
        random, given = backend.rng_state(), inputs.clone(example)
        output = eager(*given.args, **given.kwargs)
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

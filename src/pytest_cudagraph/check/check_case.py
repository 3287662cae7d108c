"""What is compared at one batch size, and a call that agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cudagraph.check.differences import ResultComparison
from pytest_cudagraph.check.initial_state import CallResult, InitialState
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import CapturedGraph, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """What is compared at one batch size."""

    graph: CapturedGraph
    eager: Model
    captured: Model
    """What the graph was captured from: compiled code, or eager itself."""
    example: Example
    dims: Sequence[int | None]
    """For each leaf of the example the dimension of its rows. None if it has no rows."""
    start: InitialState
    comparison: ResultComparison
    moved: tuple[str, ...] = ()
    """State that has another address than at capture."""
    others: tuple[InitialState, ...] = ()
    """Where each batch size has tensors of its own: the present state, and the state after a call at another size."""
    made: tuple[str, ...] = ()
    """The tensors that a first call at this batch size makes anew."""

    @property
    def batch_size(self) -> int:
        """The batch size of the graph and of the example."""
        return self.comparison.batch_size

    @property
    def is_compiled(self) -> bool:
        """Whether the graph holds compiled code, which rounds differently than eager."""
        return self.captured is not self.eager


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A call on ordinary inputs whose replay agreed with eager."""

    example: Example
    seed: int
    eager: CallResult
    noise: Mapping[str, float]
    """The largest difference between two eager runs, by place."""
    replay: CallResult

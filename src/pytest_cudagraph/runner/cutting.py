"""What is captured, and what a few eager calls tell of it: what is written, where outputs have rows, whether to pad."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import inputs, leaves
from pytest_cudagraph.backends.traps import TrapGuard
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.containers import container_changes
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.runner.independence import Rows, why_dependent, why_state_differs
from pytest_cudagraph.runner.rows import Cut, NoCut, find_cut, padded
from pytest_cudagraph.runner.statistics import EagerReason
from pytest_cudagraph.state import Undo

_SEED = 0
"""Of the rows that are put beside the example's: the same in every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is captured: a model, an example of its arguments, and within which limits."""

    model: Model
    example: Example
    batch_dim: Any
    backend: Backend
    max_graphs: int | None
    strict: bool
    check_rows: bool

    def example_at(self, rows: int) -> Example:
        """Arguments with this number of rows, in memory of their own."""
        made = inputs.batch_examples(self.example.args, self.example.kwargs, (rows,), self.batch_dim)
        return inputs.clone(made[rows])


class _Calls:
    """Eager calls of the model, each from the same state and random state, none of which leaves a trace."""

    def __init__(self, setup: Setup, undo: Undo) -> None:
        self._setup, self._undo = setup, undo
        self.is_random = False

    def __call__(self, example: Example) -> Any:
        # On a copy: a model that writes to its inputs, or takes items out of a dict, must not spoil the example.
        return self.on(inputs.clone(example))

    def on(self, example: Example) -> Any:
        """The same on the very tensors and containers of an example."""
        backend = self._setup.backend
        with self._undo.undone(), backend.running():
            before = leaves.tensors_in(backend.rng_state())
            output = self._setup.model(*example.args, **example.kwargs)
            after = leaves.tensors_in(backend.rng_state())
            self.is_random |= not all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            # An output may be state, which is about to be brought back.
            return leaves.map_tensors(torch.clone, output)

    def guarded(self, example: Example) -> Any:
        """The same for values that the model may not take, which on a GPU could end the process's work."""
        with self._trap():
            return self(example)

    def written(self, example: Example) -> Mapping[str, torch.Tensor]:
        """What such a call, of values that the model may not take, leaves in its state, by name."""
        given = inputs.clone(example)
        with self._trap(), self._undo.undone(), self._setup.backend.running():
            self._setup.model(*given.args, **given.kwargs)
            return self._undo.written()

    def _trap(self) -> AbstractContextManager[object]:
        return TrapGuard() if self._setup.backend.kind == "cuda" else nullcontext()


def learn_cut(setup: Setup, undo: Undo, rows: int) -> Cut | NoCut:
    """How outputs of ``rows`` rows are cut to fewer; or why they cannot, or may not, be."""
    calls = _Calls(setup, undo)
    whole, shorter = setup.example_at(rows), setup.example_at(rows - 1)
    cut = find_cut(calls, whole, shorter, rows)
    if not setup.check_rows or not isinstance(cut, Cut):
        return cut
    kept = max(1, rows // 2)
    why = why_dependent(
        calls,
        calls.guarded,
        Rows(whole=whole, shorter=shorter, mixed=_mixed(setup, rows, kept), rows=rows, kept=kept),
        cut,
        is_random=calls.is_random,
    )
    if why:
        return NoCut(why, EagerReason.MIXED_ROWS)
    trials = [(fewer, _padded(setup, fewer, rows)) for fewer in (inputs.fresh(shorter, _SEED), shorter)]
    why = why_state_differs(calls.written, trials)
    return NoCut(why, EagerReason.PADDED_STATE) if why else cut


def written_arguments(setup: Setup, undo: Undo, rows: int) -> tuple[str, ...]:
    """What of the arguments an eager call writes to: tensors, and places in dicts and lists: ``args[1]``.

    By torch's counters of versions, which see a write of what was there before, as zeros into an empty cache; and by
    the bits, for the few ways around the counters (``.data``, the statistics of a batch norm).
    """
    example = setup.example_at(rows)
    with torch.inference_mode(False):  # inference tensors have no versions
        given = inputs.clone(example)
    before = leaves.named_leaves((given.args, given.kwargs))
    tensors = inputs.named_tensors(given.args, given.kwargs)
    versions = {name: tensor._version for name, tensor in tensors.items()}
    _Calls(setup, undo).on(given)
    changed = inputs.changed_tensors(example, given)
    written = [name for name, tensor in tensors.items() if name in changed or tensor._version != versions[name]]
    places = [name for name, _, _ in container_changes(before, leaves.named_leaves((given.args, given.kwargs)))]
    return (*written, *places)


def _padded(setup: Setup, shorter: Example, rows: int) -> Example:
    """``shorter`` as a call of so many rows is padded to ``rows``."""
    values, structure = leaves.flatten((shorter.args, shorter.kwargs))
    dims = inputs.batched_dims(setup.example.args, setup.example.kwargs, setup.batch_dim)
    wide = [
        value if dim is None else padded(value, dim % value.ndim, rows) for value, dim in zip(values, dims, strict=True)
    ]
    args, kwargs = leaves.unflatten(structure, wide)
    return Example(args=args, kwargs=kwargs)


def _mixed(setup: Setup, rows: int, kept: int) -> Example:
    """The first rows of the example beside new ones."""
    wider = inputs.fresh(setup.example_at(rows), _SEED)
    dims = inputs.batched_dims(setup.example.args, setup.example.kwargs, setup.batch_dim)
    return inputs.beside(setup.example_at(kept), wider, dims)

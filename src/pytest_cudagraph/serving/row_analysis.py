"""What a few eager calls show of a model: what it writes, where its outputs have rows, whether rows are independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import container_changes
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.rows import Cut, NoCut, find_cut, padded
from pytest_cudagraph.serving.statistics import EagerReason
from pytest_cudagraph.state import Undo

Call = Callable[[Example], Any]
"""Runs the model from one and the same state and random state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Examples whose first rows are the same: ``rows`` of them, one less, and ``kept`` of them beside other rows."""

    whole: Example
    shorter: Example
    mixed: Example
    rows: int
    kept: int


def why_dependent(call: Call, careful: Call, examples: Rows, cut: Cut, *, is_random: bool) -> str:
    """Why rows may not be padded; empty where nothing speaks against it, or where the model takes no other rows.

    ``careful`` is the call for rows that were made up, and raises for what the model does not take.

    The same shapes with other rows beside them must give the same answer, up to what the model does not repeat by
    itself; one row less the same up to half of the dtype's digits, since other shapes are summed in another order.
    A model that draws random numbers is only tried with the same shapes, where it draws the same ones.
    """
    whole, again = call(examples.whole), call(examples.whole)
    if not is_random:
        fewer = examples.rows - 1
        where = _first_gap(cut(whole, fewer), cut(call(examples.shorter), fewer), None, _half_of_the_digits)
        if where is not None:
            return f"output{where} depends on the number of rows"
    mixed = _taken(careful, examples.mixed)
    if mixed is None:
        return ""
    first, noisy, other = (cut(output, examples.kept) for output in (whole, again, mixed))
    where = _first_gap(first, other, noisy, _last_digit)
    return "" if where is None else f"output{where} depends on the other rows"


def why_state_differs(
    written: Callable[[Example], Mapping[str, torch.Tensor]], trials: Iterable[tuple[Example, Example]]
) -> str:
    """Why rows may not be padded for what a call leaves in the model's state; empty where nothing speaks against it.

    ``trials`` are rows, and the same ones padded; the first that the model takes is the one that counts. A pad row
    repeats the last one: what writes it to the same place leaves the same there; what counts it, adds it up or gives it
    a place of its own does not. Up to half of the dtype's digits, as for outputs.
    """
    for rows, with_padding in trials:
        alone = _taken(written, rows)
        among = alone and _taken(written, with_padding)
        if alone is None or among is None:
            continue
        for name in {**alone, **among}:
            one, other = alone.get(name), among.get(name)
            if one is None or other is None or _gap(one, other) > _half_of_the_digits(one):
                return f"a pad row would change what a call writes to {name}"
        return ""
    return ""


def _taken(call: Call, example: Example) -> Any:
    try:
        return call(example)
    # Whatever it raises: these values were made up, and nobody promised that the model takes them.
    except Exception:
        return None


def _first_gap(one: Any, other: Any, again: Any, allowed: Callable[[torch.Tensor], float]) -> str | None:
    """The path of the first output that differs by more than is allowed, and than the model differs from itself."""
    values, _ = pytree.flatten(other)
    noisy = [None] * len(values) if again is None else pytree.flatten(again)[0]
    for (path, value), found, repeated in zip(pytree.named_leaves(one), values, noisy, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        noise = 0.0 if repeated is None else _gap(value, repeated)
        if math.isfinite(noise) and _gap(value, found) > allowed(value) + 2 * noise:
            return path
    return None


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; NaN equals NaN, and whole numbers that differ lie 1 apart at least."""
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    gaps = torch.where((first == second) | (first.isnan() & second.isnan()), 0.0, (first - second).abs())
    return float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _last_digit(tensor: torch.Tensor) -> float:
    return _largest(tensor) * torch.finfo(tensor.dtype).eps if _is_inexact(tensor) else 0.0


def _half_of_the_digits(tensor: torch.Tensor) -> float:
    return _largest(tensor) * math.sqrt(torch.finfo(tensor.dtype).eps) if _is_inexact(tensor) else 0.0


def _largest(tensor: torch.Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    magnitudes = tensor.to(wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(magnitudes.max()) if tensor.numel() else 0.0


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
            before = pytree.tensors_in(backend.rng_state())
            output = self._setup.model(*example.args, **example.kwargs)
            after = pytree.tensors_in(backend.rng_state())
            self.is_random |= not all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            # An output may be state, which is about to be brought back.
            return pytree.map_tensors(torch.clone, output)

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
    before = pytree.named_leaves((given.args, given.kwargs))
    tensors = inputs.named_tensors(given.args, given.kwargs)
    versions = {name: tensor._version for name, tensor in tensors.items()}
    _Calls(setup, undo).on(given)
    changed = inputs.changed_tensors(example, given)
    written = [name for name, tensor in tensors.items() if name in changed or tensor._version != versions[name]]
    places = [name for name, _, _ in container_changes(before, pytree.named_leaves((given.args, given.kwargs)))]
    return (*written, *places)


def _padded(setup: Setup, shorter: Example, rows: int) -> Example:
    """``shorter`` as a call of so many rows is padded to ``rows``."""
    values, structure = pytree.flatten((shorter.args, shorter.kwargs))
    dims = inputs.batched_dims(setup.example.args, setup.example.kwargs, setup.batch_dim)
    wide = [
        value if dim is None else padded(value, dim % value.ndim, rows) for value, dim in zip(values, dims, strict=True)
    ]
    args, kwargs = pytree.unflatten(structure, wide)
    return Example(args=args, kwargs=kwargs)


def _mixed(setup: Setup, rows: int, kept: int) -> Example:
    """The first rows of the example beside new ones."""
    wider = inputs.fresh(setup.example_at(rows), _SEED)
    dims = inputs.batched_dims(setup.example.args, setup.example.kwargs, setup.batch_dim)
    return inputs.beside(setup.example_at(kept), wider, dims)

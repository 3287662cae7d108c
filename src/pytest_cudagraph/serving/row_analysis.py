"""Learn from a few eager calls of a model: what it writes, where its outputs have rows, if rows are independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.audit.observer import observing
from pytest_cudagraph.audit.rule_checks import Operators
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import container_changes, opaque_arguments
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.rows import Cut, NoCut, find_cut, padded
from pytest_cudagraph.serving.statistics import NoGraphReason
from pytest_cudagraph.state import Constants, Undo

_SEED = 0
"""Of new rows: the same in every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """The model that a runner captures, and an example of its arguments."""

    model: Model
    example: Example
    batch_dim: Any
    backend: Backend
    check_rows: bool
    pad: bool | None
    """Whether calls are padded. None: unless that would change the model's state."""

    def example_at(self, rows: int) -> Example:
        """A copy of the example with this number of rows."""
        made = inputs.batch_examples(self.example, (rows,), self.batch_dim)
        return inputs.clone(made[rows])


def learn_cut(setup: RunnerSetup, undo: Undo, rows: int) -> Cut | NoCut:
    """How outputs of ``rows`` rows are cut to fewer, or why padded calls would be wrong."""
    calls = _Calls(setup, undo)
    whole, shorter = setup.example_at(rows), setup.example_at(rows - 1)
    cut = find_cut(calls, whole, shorter, rows)
    if not isinstance(cut, Cut):
        return cut
    if setup.check_rows:
        output = calls(whole)
        why = _depends_on_row_count(calls, cut, output, shorter, rows)
        why = why or _depends_on_rows(calls, cut, output, whole, rows)
        if why:
            return NoCut(why, NoGraphReason.MIXED_ROWS)
    if setup.pad is None:
        trials = [(fewer, _padded(setup, fewer, rows)) for fewer in (inputs.fresh(shorter, _SEED), shorter)]
        if why := _state_changed_by_padding(calls, trials):
            return NoCut(why, NoGraphReason.PADDED_STATE)
    return cut


def written_arguments(setup: RunnerSetup, undo: Undo, rows: int) -> tuple[str, ...]:
    """The arguments that an eager call writes to: tensors, and places in dicts and lists, such as ``args[1]``.

    Version counters detect a write of equal values, such as zeros into an empty cache. A bitwise comparison detects
    the few writes that they miss (``.data``, the statistics of a batch norm).
    """
    example = setup.example_at(rows)
    with torch.inference_mode(False):  # inference tensors have no version counter
        copied = inputs.clone(example)
    before = pytree.named_leaves((copied.args, copied.kwargs))
    tensors = inputs.named_tensors(copied)
    versions = {name: tensor._version for name, tensor in tensors.items()}
    _Calls(setup, undo).without_copy(copied)
    changed = inputs.changed_tensors(example, copied)
    written = [name for name, tensor in tensors.items() if name in changed or tensor._version != versions[name]]
    places = [name for name, _, _ in container_changes(before, pytree.named_leaves((copied.args, copied.kwargs)))]
    return (*written, *places)


class _Calls:
    """Eager calls of the model. Each starts from the same state and random state, which are restored after it."""

    def __init__(self, setup: RunnerSetup, undo: Undo) -> None:
        self.setup, self._undo = setup, undo
        self.is_random = False

    def __call__(self, example: Example) -> Any:
        # A copy, because a model may write to its inputs or remove items from a dict.
        return self.without_copy(inputs.clone(example))

    def without_copy(self, example: Example) -> Any:
        """Call with the tensors and containers of the example themselves."""
        with self._undo.undone(), self.setup.backend.running():
            before = self._undo.random_state()
            output = self.setup.model(*example.args, **example.kwargs)
            self.is_random |= not pytree.has_same_tensors(before, self._undo.random_state())
            # An output may be state, which is restored next.
            return pytree.map_tensors(torch.clone, output)

    def guarded(self, example: Example) -> Any:
        """A call with new values; None if the model raises, because it need not accept them."""
        return self._attempt(lambda: self(example))

    def written(self, example: Example) -> Mapping[str, torch.Tensor] | None:
        """The state that a call with new values writes, by name; None if the model raises."""
        copied = inputs.clone(example)

        def call() -> Mapping[str, torch.Tensor]:
            with self._undo.undone(), self.setup.backend.running():
                self.setup.model(*copied.args, **copied.kwargs)
                return self._undo.written()

        tensors: Mapping[str, torch.Tensor] | None = self._attempt(call)
        return tensors

    def _attempt(self, call: Callable[[], Any]) -> Any:
        # On a GPU, a value that an operator does not accept could stop all further work of the process.
        guard: AbstractContextManager[object] = TrapGuard() if self.setup.backend.kind == "cuda" else nullcontext()
        try:
            with guard:
                return call()
        # A model may raise anything for values that it does not accept.
        except Exception:
            return None


def _depends_on_row_count(calls: _Calls, cut: Cut, output: Any, shorter: Example, rows: int) -> str:
    """A message if a call with one row less gives other outputs, else empty.

    Outputs agree to half of the dtype's digits, because other shapes are summed in another order. A random
    model draws other numbers for another shape, and is not tested.
    """
    if calls.is_random:
        return ""
    where = _first_gap(cut(output, rows - 1), cut(calls(shorter), rows - 1), None, _half_of_the_digits)
    return "" if where is None else f"output{where} depends on the number of rows"


def _depends_on_rows(calls: _Calls, cut: Cut, output: Any, whole: Example, rows: int) -> str:
    """A message if the same rows next to new rows give other outputs, else empty, also if the model raises.

    Differences between two equal calls are tolerated.
    """
    kept = max(1, rows // 2)
    mixed = calls.guarded(_mixed(calls.setup, rows, kept))
    if mixed is None:
        return ""
    where = _first_gap(cut(output, kept), cut(mixed, kept), cut(calls(whole), kept), _last_digit)
    return "" if where is None else f"output{where} depends on the other rows"


def _state_changed_by_padding(calls: _Calls, trials: Iterable[tuple[Example, Example]]) -> str:
    """A message if padding would change the state that a call writes, else empty.

    ``trials`` are rows, and the same rows padded. The first trial that the model accepts decides. A pad row repeats the
    last row. So a repeated write to the same place leaves the same state. A count, a sum or a separate row does not.
    States agree to half of the dtype's digits, like outputs. If the model writes and accepts no trial, that is the
    message.
    """
    not_tried = ""
    for rows, with_padding in trials:
        alone = calls.written(rows)
        among = alone and calls.written(with_padding)
        if alone is None:
            continue
        if among is None:
            not_tried = f"a call writes to {next(iter(alone))}, and with a pad row the model raises"
            continue
        for name in {**alone, **among}:
            one, other = alone.get(name), among.get(name)
            if one is None or other is None or _gap(one, other) > _half_of_the_digits(one):
                return f"a pad row would change what a call writes to {name}"
        return ""
    return not_tried


def _padded(setup: RunnerSetup, shorter: Example, rows: int) -> Example:
    """``shorter``, padded to ``rows`` like a call."""
    values, structure = pytree.flatten((shorter.args, shorter.kwargs))
    dims = inputs.batched_dims(setup.example, setup.batch_dim)
    wide = [
        value if dim is None else padded(value, dim % value.ndim, rows) for value, dim in zip(values, dims, strict=True)
    ]
    args, kwargs = pytree.unflatten(structure, wide)
    return Example(args=args, kwargs=kwargs)


def _mixed(setup: RunnerSetup, rows: int, kept: int) -> Example:
    """The first ``kept`` rows of the example, and new rows after them."""
    wider = inputs.fresh(setup.example_at(rows), _SEED)
    dims = inputs.batched_dims(setup.example, setup.batch_dim)
    return inputs.beside(setup.example_at(kept), wider, dims)


def _first_gap(one: Any, other: Any, again: Any, allowed: Callable[[torch.Tensor], float]) -> str | None:
    """The path of the first output whose gap exceeds what is allowed plus twice the gap between equal calls."""
    values, _ = pytree.flatten(other)
    noisy = [None] * len(values) if again is None else pytree.flatten(again)[0]
    for (path, value), other, repeated in zip(pytree.named_leaves(one), values, noisy, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        noise = 0.0 if repeated is None else _gap(value, repeated)
        if math.isfinite(noise) and _gap(value, other) > allowed(value) + 2 * noise:
            return path
    return None


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference. NaN equals NaN."""
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


class _WritesParameterError(Exception):
    """Ends a call before it writes to a parameter that nobody has copied."""


class _WriteGuard:
    """Runs operations, but none that writes to one of the parameters."""

    def __init__(self, constants: Constants) -> None:
        self._constants, self._operators = constants, Operators()
        self.is_safe = True

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``. Raises :class:`_WritesParameterError` instead of a write."""
        if any(map(self._is_constant, self._operators.of(func).written(args, kwargs))):
            self.is_safe = False
            raise _WritesParameterError
        return func(*args, **kwargs)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._constants


def writes_parameters(model: Model, example: Example, backend: Backend) -> bool:
    """Whether an eager call on ``example`` writes large parameters. The model and the generators stay as they were."""
    constants = Constants.take(model)
    if not constants:
        return False
    undo, guard = Undo(model, backend, extras=opaque_arguments([example]), constants=constants), _WriteGuard(constants)
    # Whatever the model raises here, it raises in the capture too.
    with suppress(Exception), undo.undone():
        copied = inputs.clone(example)
        with backend.running(), observing(guard.run):
            model(*copied.args, **copied.kwargs)
    return not guard.is_safe

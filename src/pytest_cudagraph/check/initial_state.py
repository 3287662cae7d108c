"""Run eager and replay from the same state, inputs and seed, and record what each call did."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.check.assignments import Assignments
from pytest_cudagraph.check.compare import has_nan
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import is_opaque, opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.state import NO_CONSTANTS, Changes, Constants, Snapshot
from pytest_cudagraph.values import Assigned

Change = Callable[[], AbstractContextManager[object]]
"""Makes a context manager that changes state in place inside, and brings it back."""


def is_object(leaf: Any) -> bool:
    """Whether the values of an output cannot be compared."""
    return is_opaque(leaf) and not pytree.is_array(leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one call returned and changed. Tensors are copies, except in ``held``."""

    structure: pytree.Structure
    outputs: Mapping[str, Any]
    """Every leaf by its place: ``output['logits']``, or ``output`` for a single tensor."""
    held: Mapping[str, Any]
    """The same leaves as returned. Those of a replay are the graph's own buffers."""
    state: Mapping[str, torch.Tensor | None]
    """The tensors of the state that changed, by name (``buffer 'steps'``). None if it is gone."""
    rebound: frozenset[str]
    """State that is new, or that has another address than before."""
    python: tuple[str, ...]
    """Plain values of the model that changed: ``steps: 3 -> 4``."""
    inputs: tuple[str, ...]
    """Arguments that the call changed in place."""
    random: bool
    """Whether the call drew random numbers."""
    generators: Any
    """The state of the random generators after the call."""
    assigned: tuple[Assigned, ...]
    """Rebound state and changed Python values, without lines."""

    @property
    def tensor_count(self) -> int:
        """How many outputs are tensors."""
        return sum(isinstance(leaf, torch.Tensor) for leaf in self.outputs.values())

    @property
    def nan_places(self) -> tuple[str, ...]:
        """The outputs that hold NaN."""
        outputs = self.outputs.items()
        return tuple(where for where, leaf in outputs if isinstance(leaf, torch.Tensor) and has_nan(leaf))

    @property
    def opaque_places(self) -> tuple[str, ...]:
        """The outputs that are objects, with their class: ``output['cache'] (StaticCache)``."""
        return tuple(f"{where} ({type(leaf).__name__})" for where, leaf in self.outputs.items() if is_object(leaf))


class InitialState:
    """The state before the check. Every call starts from it. As a context manager, it restores the state on exit."""

    def __init__(
        self,
        model: Model,
        examples: Iterable[Example],
        backend: Backend,
        constants: Constants = NO_CONSTANTS,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._backend, self._examples = backend, list(examples)
        extras = opaque_arguments(self._examples)
        self._constants = constants if snapshot else constants.renewed()
        self._snapshot = snapshot or Snapshot.take(model, extras=extras, constants=constants)
        self._roots = (model, extras)
        self._rng = backend.rng_state(*self._roots)
        self._lost: set[str] = set()
        self._live = self._snapshot.live()
        self._nouns = _nouns(model, self._live)
        self.tensors = {self._noun(name): tensor for name, tensor in self._snapshot.tensors().items()}
        """The saved state. Do not write to it."""
        self.may_trap = backend.kind == "cuda"
        """Whether an invalid value, such as an index out of range, can end the device's work for the whole process."""
        self.not_seen = tuple(f"state {name!r}" for name in self._snapshot.not_seen)
        """State that can be neither compared nor restored."""

    def as_captured(self, captured: Snapshot) -> InitialState:
        """The tensors that the model had at the capture of one batch size, with the values of now."""
        captured.restore()
        self._snapshot.rewinder()()
        snapshot = self._snapshot.taken_again()
        found = InitialState(self._roots[0], self._examples, self._backend, self._constants, snapshot)
        found._lost = self._lost
        self._snapshot.restore()
        return found

    def run(
        self,
        call: Model,
        example: Example,
        seed: int,
        *,
        change: Change | None = None,
        records_state: bool | None = None,
    ) -> CallResult:
        """Restore the state, seed the generators, and call on a copy of ``example``.

        ``change`` changes the state during the call. The result then records no state, unless ``records_state`` is set.
        """
        self._snapshot.restore()
        if change is None:
            return self._run(call, example, seed, records_state=records_state is not False)
        changed = ExitStack()
        with self._backend.running():
            changed.enter_context(change())
        try:
            return self._run(call, example, seed, records_state=bool(records_state))
        finally:
            with self._backend.running():
                changed.close()

    def _run(self, call: Model, example: Example, seed: int, *, records_state: bool) -> CallResult:
        _seed_generators(seed, self._backend.kind)
        seeded = self._backend.rng_state()
        given = inputs.clone(example)
        with self._backend.running():
            output = call(*given.args, **given.kwargs)
        self._backend.synchronize()
        generators = self._backend.rng_state()
        held = {f"output{path}": leaf for path, leaf in pytree.named_leaves(output)}
        changes = self._snapshot.changes() if records_state else Changes()
        rebound, python = (*changes.rebound, *changes.added), (*changes.python, *changes.training)
        return CallResult(
            structure=pytree.flatten(output)[1],
            outputs={where: _copy(leaf) for where, leaf in held.items()},
            held=held,
            state=self._copied((*changes.written, *rebound, *changes.removed)),
            rebound=frozenset(self._noun(name) for name in rebound),
            python=python,
            assigned=tuple(map(Assigned, (*sorted(rebound), *(value.partition(": ")[0] for value in python)))),
            inputs=inputs.changed_tensors(example, given),
            random=not pytree.has_same_tensors(generators, seeded),
            generators=generators,
        )

    def live_call(self, call: Model, example: Example, seed: int, names: Collection[str]) -> Callable[[], CallResult]:
        """A call that finds the same tensors, arguments and seed each time, but the Python values of the last one.

        It records the state tensors of these names.
        """
        self._snapshot.restore()
        rewind, arguments = self._snapshot.rewinder(), self._snapshot.of_extras()

        def run() -> CallResult:
            rewind()
            arguments.restore()
            result = self._run(call, example, seed, records_state=False)
            live = {self._noun(name): tensor for name, tensor in self._snapshot.live().items()} if names else {}
            return replace(result, state={name: _copy(live[name]) for name in names if name in live})

        return run

    def located(self, assigned: tuple[Assigned, ...], call: Model, example: Example) -> tuple[Assigned, ...]:
        """The same with the lines at which one more call assigns them."""
        if not assigned:
            return ()
        assignments = Assignments(self._roots[0])
        # The verdict stands, whatever this call raises.
        with assignments.noted(), suppress(Exception):
            self.run(call, example, seed=0)
        return tuple(map(assignments.located, assigned))

    def _copied(self, names: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
        now = self._snapshot.live() if names else {}
        return {self._noun(name): _copy(now.get(name)) for name in names}

    def lost(self) -> tuple[str, ...]:
        """The constants that were written since the start, each once. Their values cannot be restored."""
        found = [name for name in self._constants.changed() if name not in self._lost]
        self._lost.update(found)
        return tuple(self._noun(name) for name in found)

    def replaced_by(self, result: CallResult) -> dict[str, Change]:
        """The plain tensors that a call replaced, each with a change that fills the old one with other values."""
        old = {self._noun(name): tensor for name, tensor in self._live.items()}
        names = [name for name in result.rebound if name.startswith("state ") and name in old]
        return {name: functools.partial(_filled_with_others, old[name]) for name in sorted(names)}

    def weights(self, moved: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The live floating parameters that can be changed in place. Buffers if there are no such parameters.

        State in ``moved`` (see :meth:`moved_since`) counts as a parameter.
        """
        found = {self._noun(name): tensor for name, tensor in self._live.items() if _can_change(tensor)}
        parameters = {name: each for name, each in found.items() if isinstance(each, nn.Parameter) or name in moved}
        return parameters or found

    def poison(self, graph: CapturedGraph) -> None:
        """Overwrite the outputs of earlier replays."""
        with self._backend.running():
            graph.poison()
        self._backend.synchronize()

    def moved_since(self, captured_at: Mapping[str, int]) -> tuple[str, ...]:
        """The state that has another address than in ``captured_at``."""
        now = {name: tensor.data_ptr() for name, tensor in self._snapshot.live().items()}
        moved = (name for name, address in captured_at.items() if now.get(name, address) != address)
        return tuple(sorted(self._noun(name) for name in moved))

    def __enter__(self) -> InitialState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Restore the state. Raises :class:`CudagraphError` naming what cannot be restored."""
        # After an error the device may refuse the restore too. The first error is the one to report.
        with nullcontext() if error is None else suppress(RuntimeError, CudagraphError):
            self._restore()

    def _restore(self) -> None:
        self._snapshot.restore()
        self._backend.set_rng_state(self._rng)
        left = [*self._snapshot.changes().names, *self.lost()]
        if not pytree.has_same_tensors(self._backend.rng_state(*self._roots), self._rng):
            left.append("the random generators")
        if left:
            raise CudagraphError(f"the check could not restore the state of the model: {', '.join(left)}")

    def _noun(self, name: str) -> str:
        return self._nouns.get(name, f"state {name!r}")


def plain_result(call: Model, example: Example, backend: Backend, seed: int) -> CallResult:
    """The outputs of one call on a copy of ``example``, from whatever state there is. Nothing else is recorded."""
    _seed_generators(seed, backend.kind)
    copied = inputs.clone(example)
    with backend.running():
        output = call(*copied.args, **copied.kwargs)
    backend.synchronize()
    held = {f"output{path}": leaf for path, leaf in pytree.named_leaves(output)}
    return CallResult(
        structure=pytree.flatten(output)[1], outputs={where: _copy(leaf) for where, leaf in held.items()}, held=held,
        state={}, rebound=frozenset(), python=(), inputs=(), random=False, generators=None, assigned=(),
    )  # fmt: skip


def _seed_generators(seed: int, kind: str) -> None:
    # torch.manual_seed formats a traceback for each kind of device that is missing, which takes milliseconds.
    torch.default_generator.manual_seed(seed)
    if kind == "cuda":
        torch.cuda.manual_seed_all(seed)


def _can_change(tensor: torch.Tensor) -> bool:
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    # Eight-bit floats lack arithmetic, torch cannot write to expanded tensors, and meta tensors hold no values.
    is_expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return is_floating and tensor.itemsize > 1 and tensor.numel() > 0 and not is_expanded and not tensor.is_meta


@contextmanager
def _filled_with_others(tensor: torch.Tensor) -> Iterator[None]:
    before = tensor.clone()
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    tensor.fill_(math.nan if is_floating else 0 if bool(tensor.any()) else 1)  # 0 and 1 are valid as an index
    try:
        yield
    finally:
        tensor.copy_(before)


def _nouns(model: Model, live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The name of each state tensor in messages: ``parameter 'weight'``, ``buffer 'steps'``, ``state 'cache[0]'``."""
    buffers = {id(buffer) for module in state.modules_of(model) for buffer in module.buffers()}
    nouns: dict[str, str] = {}
    for name, tensor in live.items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if id(tensor) in buffers else "state"
        nouns[name] = f"{kind} {name!r}"
    return nouns


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if pytree.is_array(leaf) else leaf

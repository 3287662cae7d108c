"""The common start of eager and replay: the same state, the same inputs, the same seed, and what each made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.protocols import Backend, CapturedGraph, Model
from pytest_cudagraph.state import Changes, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one call gave and did. Tensors are copies, but for ``held``."""

    structure: pytree.Structure
    outputs: Mapping[str, Any]
    """Every leaf by its place: ``output['logits']``, or ``output`` for a lone tensor."""
    held: Mapping[str, Any]
    """The same leaves as they were returned; those of a replay lie in the graph's own buffers."""
    state: Mapping[str, torch.Tensor | None]
    """The tensors of the state that are not as before (``buffer 'steps'``); None for one that is gone."""
    rebound: frozenset[str]
    """The state that lies elsewhere than before, or that was not there before."""
    python: tuple[str, ...]
    """Plain values of the model that are not as before: ``steps: 3 -> 4``."""
    inputs: tuple[str, ...]
    """Arguments that the call changed in place."""
    random: bool
    """Whether the call drew random numbers."""
    generators: Any
    """Where the call left the random generators."""
    assigned: tuple[str, ...] = ()
    """What is rebound, and the Python values, by the names that the model has for them."""


class InitialState:
    """The state before the check: every call begins there. A context manager: leaving it brings everything back."""

    def __init__(self, model: Model, examples: Iterable[Example], backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._snapshot = Snapshot.take(model, extras=opaque_arguments(examples))
        self._rng = backend.rng_state()
        self._live = self._snapshot.live()
        self._nouns = _nouns(model, self._live)
        self.tensors = {self._noun(name): tensor for name, tensor in self._snapshot.tensors().items()}
        """The state itself; not to be written to."""
        self.traps = backend.kind == "cuda"
        """Whether an operation on values that it cannot take may end the device's work for the whole process."""
        self.not_seen = tuple(f"state {name!r}" for name in self._snapshot.not_seen)
        """State that can be neither compared nor brought back."""

    def answer(
        self, call: Model, example: Example, seed: int, *, change: Callable[[], None] | None = None
    ) -> CallResult:
        """Call from this state on a copy of ``example``, with the generators seeded.

        ``change`` changes the state before the call; what the call does to it is then not recorded.
        """
        self._snapshot.restore()
        if change is not None:
            with self._backend.running():
                change()
        self._seed(seed)
        seeded = self._backend.rng_state()
        given = inputs.clone(example)
        with self._backend.running():
            output = call(*given.args, **given.kwargs)
        self._backend.synchronize()
        generators = self._backend.rng_state()
        found, structure = pytree.flatten(output)
        held = {f"output{path}": leaf for path, leaf in zip(pytree.paths(structure), found, strict=True)}
        done = self._done() if change is None else _NOTHING_DONE
        return CallResult(
            structure=structure,
            outputs={where: _copy(leaf) for where, leaf in held.items()},
            held=held,
            state=done.state,
            rebound=done.rebound,
            python=done.python,
            assigned=done.assigned,
            inputs=inputs.changed_tensors(example, given),
            random=not pytree.has_same_tensors(generators, seeded),
            generators=generators,
        )

    def _seed(self, seed: int) -> None:
        # Not torch.manual_seed: for each kind of device that is not there it formats a traceback, milliseconds a call.
        torch.default_generator.manual_seed(seed)
        if self._backend.kind == "cuda":
            torch.cuda.manual_seed_all(seed)

    def weights(self) -> dict[str, torch.Tensor]:
        """The floating parameters, themselves, which a change in place can be tried on; buffers where none is there."""
        found = {name: tensor for name, tensor in self._live.items() if _can_change(tensor)}
        parameters = {name: tensor for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}
        return {self._noun(name): tensor for name, tensor in (parameters or found).items()}

    def poison(self, graph: CapturedGraph) -> None:
        """Make the outputs of earlier replays unreadable."""
        with self._backend.running():
            graph.poison()
        self._backend.synchronize()

    def moved_since(self, captured_at: Mapping[str, int]) -> tuple[str, ...]:
        """The state that lies at another address than it did, in words."""
        now = {name: tensor.data_ptr() for name, tensor in self._snapshot.live().items()}
        moved = (name for name, address in captured_at.items() if now.get(name, address) != address)
        return tuple(sorted(self._noun(name) for name in moved))

    def __enter__(self) -> InitialState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise :class:`CudagraphError` naming what cannot be brought back."""
        if error is None:
            self._leave()
            return
        # A device that has failed cannot be written to either; the first error is the one to tell.
        with suppress(RuntimeError, CudagraphError):
            self._leave()

    def _leave(self) -> None:
        self._snapshot.restore()
        self._backend.set_rng_state(self._rng)
        left = _all_names(self._snapshot.changes())
        if not pytree.has_same_tensors(self._backend.rng_state(), self._rng):
            left.append("the random generators")
        if left:
            raise CudagraphError(f"the check could not bring the model back to its state before: {', '.join(left)}")

    def _noun(self, name: str) -> str:
        return self._nouns.get(name, f"state {name!r}")

    def _done(self) -> _Done:
        changes, now = self._snapshot.changes(), self._snapshot.live()
        rebound, python = (*changes.rebound, *changes.added), (*changes.python, *changes.training)
        return _Done(
            state={self._noun(name): _copy(now.get(name)) for name in (*changes.written, *rebound, *changes.removed)},
            rebound=frozenset(self._noun(name) for name in rebound),
            python=python,
            assigned=(*sorted(rebound), *(value.partition(": ")[0] for value in python)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What a call did to the state; the fields are those of :class:`CallResult`."""

    state: Mapping[str, torch.Tensor | None]
    rebound: frozenset[str]
    python: tuple[str, ...]
    assigned: tuple[str, ...] = ()


_NOTHING_DONE = _Done(state={}, rebound=frozenset(), python=())


def _can_change(tensor: torch.Tensor) -> bool:
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    # The eight-bit floats know little arithmetic; torch writes to no expanded tensor, and meta holds nothing.
    is_expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return is_floating and tensor.itemsize > 1 and tensor.numel() > 0 and not is_expanded and not tensor.is_meta


def _nouns(model: Model, live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What a reader calls each piece of state: ``parameter 'weight'``, ``buffer 'steps'``, ``state 'cache[0]'``."""
    buffers = {id(buffer) for module in state.modules_of(model) for buffer in module.buffers()}
    nouns: dict[str, str] = {}
    for name, tensor in live.items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if id(tensor) in buffers else "state"
        nouns[name] = f"{kind} {name!r}"
    return nouns


def _all_names(changes: Changes) -> list[str]:
    tensors = (*changes.written, *changes.rebound, *changes.added, *changes.removed)
    return [*tensors, *changes.python, *changes.training]


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

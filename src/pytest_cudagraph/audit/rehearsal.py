"""The calls of the model that the audit looks at, each from a known state, and everything put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_cudagraph import inputs, leaves, state
from pytest_cudagraph.audit.host_reads import HostReads, Sighting, as_if_capturing
from pytest_cudagraph.audit.recorder import open_recorder
from pytest_cudagraph.audit.trace import Origin, Outside, Trace, storage_of
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, Model

_OTHER_SEED = 1
"""Any seed will do: the other inputs only have to differ from the example."""


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """What the calls showed. A call that raised is None, with a line in ``not_judged``."""

    first: Trace
    """In the mode in which graphs are captured; composite operations show as a whole."""
    changes: state.Changes
    """What the first call changed of the state."""
    registered: frozenset[str]
    """The names of parameters and buffers among the state."""
    storages: dict[str, int]
    """The memory of every tensor of the state, by name."""
    second: Trace | None = None
    third: Trace | None = None
    """The same inputs and seed again, while Python's own state (counters, ``random``, clocks) runs on."""
    other: Trace | None = None
    """Other inputs of the same shapes, from the state of the first call."""
    parts: Trace | None = None
    """Under ``no_grad``, where composite operations show as their parts."""
    sightings: list[Sighting] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)


def rehearse(model: Model, example: Example, backend: Backend) -> Rehearsal:
    """Call the model six times; state, inputs and random generators are left as they were.

    What the model raises at the first call is not caught: it fails without any graph.
    """
    extras = [leaf for leaf in leaves.flatten((example.args, example.kwargs))[0] if not isinstance(leaf, torch.Tensor)]
    snapshot = state.Snapshot.take(model, extras=extras)
    stage = _Stage(model=model, backend=backend, extras=extras, seeded=backend.rng_state())
    registered, storages = _registered(model), stage.storages()
    with _generators_kept(backend), as_if_capturing():
        try:
            first = stage.record(example, backend.running())
            changes = snapshot.changes()
            seen = Rehearsal(first=first, changes=changes, registered=registered, storages=storages)
            seen.not_judged += [f"{name}: neither saved nor compared" for name in snapshot.not_seen]
            again = _Attempts(seen.not_judged)
            seen.second = again.call("the second call", lambda: stage.record(example, backend.running()))
            seen.third = again.call("the third call", lambda: stage.record(example, backend.running()))
            snapshot.restore()
            other = inputs.fresh(example, _OTHER_SEED)
            seen.other = again.call("the call on other inputs", lambda: stage.record(other, backend.running()))
            snapshot.restore()
            seen.parts = again.call("the call outside inference mode", lambda: stage.record(example, _no_grad()))
            snapshot.restore()
            seen.sightings = again.call("the call watched for host reads", lambda: stage.watch(example)) or []
        finally:
            snapshot.restore()
    return seen


@dataclass(slots=True, kw_only=True)
class _Stage:
    model: Model
    backend: Backend
    extras: list[Any]
    seeded: Any

    def record(self, example: Example, mode: AbstractContextManager[None]) -> Trace:
        """One call on copies of the inputs, from the seed, under the recorder."""
        given = inputs.clone(example)
        known, kept_alive = self._known(given)
        recorder = open_recorder(self.backend, known, kept_alive)
        self.backend.set_rng_state(self.seeded)
        with mode, recorder:
            output = self.model(*given.args, **given.kwargs)
        for path, leaf in leaves.named_leaves(output):
            outside = recorder.outside_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if outside is not None:
                recorder.trace.aliases.append((f"output{path}", outside))
        return recorder.trace

    def watch(self, example: Example) -> list[Sighting]:
        """One call on copies of the inputs with torch's own methods watched, and no mode in the way."""
        given = inputs.clone(example)
        reads = HostReads(on_gpu=self.backend.kind == "cuda")
        self.backend.set_rng_state(self.seeded)
        with self.backend.running(), reads.watching():
            self.model(*given.args, **given.kwargs)
        return reads.sightings

    def storages(self) -> dict[str, int]:
        """The memory of every tensor of the state as it is now, by name."""
        held = {name: storage_of(tensor) for name, tensor in state.live(self.model, extras=self.extras).items()}
        return {name: storage.cdata for name, storage in held.items() if storage is not None}

    def _known(self, given: Example) -> tuple[dict[int, Outside], list[object]]:
        held = state.live(self.model, extras=self.extras)
        passed = [(f"args{path}", leaf) for path, leaf in leaves.named_leaves(given.args)]
        passed += [(f"kwargs{path}", leaf) for path, leaf in leaves.named_leaves(given.kwargs)]
        known: dict[int, Outside] = {}
        # What the call frees (an input taken out of a dict, a parameter whose data is replaced) must not serve again
        # under the same identity: references to the storages see to that without holding the memory.
        kept_alive: list[object] = [*held.values()]
        named: tuple[tuple[Origin, Iterable[tuple[str, Any]]], ...] = (("state", held.items()), ("input", passed))
        for origin, tensors in named:
            for name, tensor in tensors:
                storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
                if storage is not None:
                    known.setdefault(storage.cdata, Outside(origin=origin, name=name, storage=storage.cdata))
                    kept_alive.append(storage)
        return known, kept_alive


@dataclass(slots=True)
class _Attempts:
    not_judged: list[str]

    def call(self, what: str, run: Callable[[], Any]) -> Any:
        """The result of ``run``; None, and a line, when the model raises."""
        try:
            return run()
        # The model may refuse what only the audit asks of it (other inputs, another mode): said, and passed over.
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self.not_judged.append(f"{what} raised {type(error).__name__}: {first_line}")
            return None


def _registered(model: Model) -> frozenset[str]:
    own = {id(t) for module in state.modules_of(model) for t in (*module.parameters(), *module.buffers())}
    return frozenset(name for name, tensor in state.live(model).items() if id(tensor) in own)


@contextmanager
def _no_grad() -> Iterator[None]:
    # Inference mode of a caller would keep composite operations whole: no_grad alone does not leave it.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _generators_kept(backend: Backend) -> Iterator[None]:
    """Put back torch's default generators, Python's and, where it is loaded, numpy's."""
    with ExitStack() as stack:
        stack.callback(backend.set_rng_state, backend.rng_state())
        stack.callback(random.setstate, random.getstate())
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield

"""One call of the model, on copies of its inputs and from the same seed, with somebody watching."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import inputs, leaves, state
from pytest_cudagraph.audit.recorder import Outline, Recorder, RuleWatch, watching
from pytest_cudagraph.audit.trace import Origin, Outside, Trace, identity_of, storage_of
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.containers import container_changes
from pytest_cudagraph.protocols import Backend, Model

Held = dict[str, torch.Tensor]
"""The tensors of the state, by name."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """The model and what each of its calls begins from; ``extras`` are opaque inputs, such as a cache."""

    model: Model
    backend: Backend
    extras: list[Any]
    seeded: Any
    _of_state: tuple[Held, dict[int, Outside], list[object]] | None = None

    def held(self) -> Held:
        """The state as it is now."""
        return state.live(self.model, extras=self.extras)

    def record(self, example: Example, held: Held, *, judges: bool = False) -> Trace:
        """A whole trace; with ``judges`` the rules of a capture too, and what of the output lies outside."""
        given = inputs.clone(example)
        recorder = Recorder(self.backend, *self._known(given, held), judges=judges)
        before = leaves.named_leaves((given.args, given.kwargs)) if judges else []
        output = self._call(given, watching(recorder))
        if judges:
            after = leaves.named_leaves((given.args, given.kwargs))
            recorder.trace.containers += [
                (f"{name} is {how}", recorder.made_by(leaf)) for name, how, leaf in container_changes(before, after)
            ]
        for path, leaf in leaves.named_leaves(output) if judges else ():
            outside = recorder.outside_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if outside is not None:
                recorder.trace.aliases.append((f"output{path}", outside))
        return recorder.trace

    def judge(self, example: Example, held: Held, mode: AbstractContextManager[Any] | None = None) -> Trace:
        """What the rules say, in ``mode`` instead of the one in which graphs are captured."""
        given = inputs.clone(example)
        rules = RuleWatch(self.backend, self._known(given, held)[0])
        self._call(given, watching(rules), mode)
        return rules.trace

    def is_like(self, first: Trace, example: Example, held: Held) -> bool:
        """Whether a call does what the recorded one did."""
        outline = Outline(first, map(identity_of, held.values()))
        self._call(inputs.clone(example), watching(outline))
        return outline.is_same

    def watch(self, example: Example, reads: AbstractContextManager[None]) -> None:
        """A call with torch's own methods watched, and no dispatch mode in the way."""
        self._call(inputs.clone(example), reads)

    def _known(self, given: Example, held: Held) -> tuple[dict[int, Outside], list[object]]:
        """The memory of state and inputs by its identity, and what keeps those identities from serving again."""
        if self._of_state is None or self._of_state[0] is not held:
            self._of_state = (held, *_memory("state", held.items()))
        _, of_state, state_alive = self._of_state
        passed = [(f"args{path}", leaf) for path, leaf in leaves.named_leaves(given.args)]
        passed += [(f"kwargs{path}", leaf) for path, leaf in leaves.named_leaves(given.kwargs)]
        of_inputs, inputs_alive = _memory("input", passed)
        return {**of_inputs, **of_state}, [*held.values(), *state_alive, *inputs_alive]

    def _call(
        self, given: Example, watched: AbstractContextManager[Any], mode: AbstractContextManager[Any] | None = None
    ) -> Any:
        self.backend.set_rng_state(self.seeded)
        with mode or self.backend.running(), watched:
            return self.model(*given.args, **given.kwargs)


def _memory(origin: Origin, named: Iterable[tuple[str, Any]]) -> tuple[dict[int, Outside], list[object]]:
    known: dict[int, Outside] = {}
    # What the call frees (an input taken out of a dict, a parameter whose data is replaced) must not serve again
    # under the same identity: references to the storages see to that without holding the memory.
    kept_alive: list[object] = []
    for name, value in named:
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            known.setdefault(storage.cdata, Outside(origin=origin, name=name, storage=storage.cdata))
            kept_alive.append(storage)
    return known, kept_alive

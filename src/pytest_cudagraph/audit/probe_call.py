"""One observed call of the model, from a known state and seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.audit.observer import Observe, RuleRecorder, RuleWatch, TraceMatcher, TraceRecorder, observing
from pytest_cudagraph.audit.python_watch import PythonWatch
from pytest_cudagraph.audit.rule_checks import OwnRules
from pytest_cudagraph.audit.trace import Origin, OutsideMemory, Trace, storage_of
from pytest_cudagraph.backends.capture_mode import storage_key
from pytest_cudagraph.backends.placement import Placement
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import container_changes
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.sources.syntax import made_on_host
from pytest_cudagraph.values import Site

_MODULE_OWN = frozenset(vars(nn.Module()))
_MAX_DEPTH = 3
"""Levels of containers and objects below an attribute of a module."""

_MAX_ENTRIES = 256

Held = dict[str, torch.Tensor]
"""The tensors of the state, by name."""


@dataclass(slots=True, kw_only=True)
class ProbeCall:
    """A call of the model, and the state from which it starts. ``extras`` are opaque inputs, such as a cache."""

    model: Model
    backend: Backend
    extras: list[Any]
    seeded: Any
    registered: frozenset[str]
    """The names of parameters and buffers among the state."""
    own_rules: OwnRules
    gpu_branches: list[Site] = field(default_factory=list)
    """Lines of the first call that branch on ``is_cuda``, which was false."""
    python_watch: PythonWatch | None = None
    """Watches the Python of the next calls."""
    _holders: tuple[tuple[str, nn.Module, str], ...] | None = None
    _of_state: tuple[Held, dict[int, OutsideMemory], list[object]] | None = None

    def held(self) -> Held:
        """The current state."""
        return state.live(self.model, extras=self.extras)

    def record_first(self, example: Example, held: Held) -> Trace:
        """A whole trace with the rules, the changes to containers, and the outputs that lie outside."""
        given = inputs.clone(example)
        known, kept_alive = self._known(given, held)
        recorder = RuleRecorder(self.backend, known, kept_alive, self._placement(known), self.own_rules)
        before = pytree.named_leaves((given.args, given.kwargs))
        output = self._call(given, _both(recorder.watch.watching(), observing(recorder.run)))
        self.gpu_branches = recorder.watch.gpu_branches
        after = pytree.named_leaves((given.args, given.kwargs))
        recorder.trace.containers += [
            (f"{name} is {how}", recorder.made_by(leaf)) for name, how, leaf in container_changes(before, after)
        ]
        makers = {name: recorder.made_by(tensor) for name, tensor in self.held().items()}
        recorder.trace.makers = {name: maker for name, maker in makers.items() if maker is not None}
        for path, leaf in pytree.named_leaves(output):
            outside = recorder.outside_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if outside is not None:
                recorder.trace.aliases.append((f"output{path}", outside))
        return recorder.trace

    def record(self, example: Example, held: Held) -> Trace:
        """A whole trace, without the rules."""
        given = inputs.clone(example)
        recorder = TraceRecorder(self.backend, *self._known(given, held))
        self._call(given, self._observing(recorder.run))
        return recorder.trace

    def judge(self, example: Example, held: Held, *, by_parts: bool = False, as_on_gpu: bool = False) -> Trace:
        """A trace with the findings of the rules only.

        ``by_parts``: outside inference mode, which keeps composite operations whole. Where the model itself is in
        inference mode, they are split. ``as_on_gpu``: on the branches that only a GPU takes.
        """
        given = inputs.clone(example)
        placement = self._placement(self._known(given, held)[0], sees_moves=not by_parts)
        rules = RuleWatch(placement, self.own_rules)
        observed = observing(rules.run, by_parts=rules.operators if by_parts else None)
        if as_on_gpu:
            # Only here: to replace methods of torch.Tensor costs more than a small model's call.
            watch = HostCallWatch(placement=placement, trace=rules.trace, as_on_gpu=True)
            self._call(given, _both(watch.watching(), observed))
        else:
            self._call(given, observed, _no_grad() if by_parts else None)
        return rules.trace

    def is_like(self, first: Trace, example: Example, held: Held) -> bool:
        """Whether a call does the same as the recorded one."""
        matcher = TraceMatcher(first, map(storage_key, held.values()))
        self._call(inputs.clone(example), self._observing(matcher.run))
        return matcher.is_same

    def _observing(self, run: Observe) -> AbstractContextManager[Any]:
        if self.python_watch is None:
            return observing(run)
        return _both(observing(self.python_watch.paused_in(run)), self.python_watch.watching())

    def _known(self, given: Example, held: Held) -> tuple[dict[int, OutsideMemory], list[object]]:
        """The memory of state and inputs by storage key, and references that keep these keys from being used again."""
        if self._of_state is None or self._of_state[0] is not held:
            self._of_state = (held, *_memory("state", held.items()))
        _, of_state, state_alive = self._of_state
        passed = [(f"args{path}", leaf) for path, leaf in pytree.named_leaves(given.args)]
        passed += [(f"kwargs{path}", leaf) for path, leaf in pytree.named_leaves(given.kwargs)]
        of_inputs, inputs_alive = _memory("input", passed)
        return {**of_inputs, **of_state}, [*held.values(), *state_alive, *inputs_alive]

    def _placement(self, known: Mapping[int, OutsideMemory], *, sees_moves: bool = True) -> Placement | None:
        """Where the tensors lie. Inputs, parameters and buffers on the device, other state perhaps on the host."""
        if self.backend.kind == "cuda":  # there tensors know their place
            return None
        device = {key for key, each in known.items() if each.origin == "input" or each.name in self.registered}
        left_behind = self._left_behind()
        # The state holds none of what an object of torch holds, as a distribution.
        kept = {*known, *left_behind} - device
        return Placement(device, kept=kept, left_behind=left_behind, sees_moves=sees_moves)

    def _left_behind(self) -> dict[int | None, str]:
        """The tensors that ``Module.to`` leaves on the host, as far as the source tells: their names by storage key."""
        if self._holders is None:
            self._holders = tuple(_holders_of_host_tensors(state.modules_of(self.model)))
        return {
            storage_key(tensor): f"{path}{entry}"
            for path, holder, attribute in self._holders
            for entry, tensor in _tensors_in(vars(holder).get(attribute))
        }

    def _call(
        self, given: Example, watched: AbstractContextManager[Any], mode: AbstractContextManager[Any] | None = None
    ) -> Any:
        self.backend.set_rng_state(self.seeded)
        with mode or self.backend.running(), watched:
            return self.model(*given.args, **given.kwargs)


def _holders_of_host_tensors(outer: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """The path, module and attribute of what a class makes on the host, where a move of the module leaves it."""
    for path, module in (named for model in outer for named in model.named_modules()):
        for attribute, value in vars(module).items():
            if attribute not in _MODULE_OWN and _may_hold(value) and made_on_host(type(module), attribute):
                yield (f"{path}.{attribute}" if path else attribute), module, attribute


def _may_hold(value: object) -> bool:
    return isinstance(value, torch.Tensor | dict | list | tuple) or hasattr(value, "__dict__")


def _tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an attribute: itself, the entries of its containers, and what its objects make on the host."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == _MAX_DEPTH or isinstance(value, nn.Module | type | ModuleType):
        return
    elif isinstance(value, dict):
        for key, entry in [*dict.items(value)][:_MAX_ENTRIES]:
            yield from _tensors_in(entry, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value[:_MAX_ENTRIES]):
            yield from _tensors_in(entry, f"{name}[{index}]", depth + 1)
    else:
        # What torch makes from tensors of the host, as a distribution, holds tensors of the host.
        is_of_torch = type(value).__module__.partition(".")[0] == "torch"
        for attribute, entry in [*getattr(value, "__dict__", {}).items()]:
            if is_of_torch or made_on_host(type(value), attribute):
                yield from _tensors_in(entry, f"{name}.{attribute}", depth + 1)


def _memory(origin: Origin, named: Iterable[tuple[str, Any]]) -> tuple[dict[int, OutsideMemory], list[object]]:
    known: dict[int, OutsideMemory] = {}
    # The call may free memory: an input that it takes out of a dict, a parameter with new data. Weak references keep
    # other memory from getting the same key, and do not keep the memory itself.
    kept_alive: list[object] = []
    for name, value in named:
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            known.setdefault(storage.cdata, OutsideMemory(origin=origin, name=name, storage=storage.cdata))
            kept_alive.append(storage)
    return known, kept_alive


@contextmanager
def _no_grad() -> Iterator[None]:
    # Inference mode of a caller keeps composite operations whole, and no_grad alone does not end it.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

"""The dispatch modes that observe one eager call of a model. Each records only what its call is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import pytree
from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.audit.rule_checks import NO_RULES, Operators, OwnRules, RuleChecker, sort_out
from pytest_cudagraph.audit.trace import OutsideMemory, Trace, TracedOperation, storage_of
from pytest_cudagraph.backends.capture_mode import ObservingMode, hidden_from_compiler, storage_key, tensors_of
from pytest_cudagraph.backends.placement import HOST_DRAW_TEXT, Placement
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import user_sites

_TRANSPARENT = (torch.nn.Parameter, torch.nn.Buffer)
"""Subclasses without their own dispatch."""


Observe = Callable[[Any, tuple[type, ...], tuple[Any, ...], dict[str, Any]], Any]
"""Sees every operation of a call, and runs it: the ``run`` of the classes below."""


class _Observing(ObservingMode):
    def __init__(self, run: Observe, by_parts: Operators | None) -> None:
        super().__init__()
        self._run = run
        self._by_parts = by_parts

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = None if self._by_parts is None else self._by_parts.of(func).parts
        if parts is None:
            return self._run(func, types, args, kwargs)
        with self:
            return parts(*args, **kwargs)


def observing(run: Observe, *, by_parts: Operators | None = None) -> ObservingMode:
    """A dispatch mode that passes every operation to ``run``.

    ``by_parts``: composite operations without a rule of their own are seen as their parts.
    """
    return hidden_from_compiler(_Observing)(run, by_parts)


class TraceRecorder:
    """Records one :class:`Trace` without the rules. ``known`` names the memory of inputs and state before the call."""

    def __init__(self, backend: Backend, known: Mapping[int, OutsideMemory], kept_alive: list[object]) -> None:
        self.trace = Trace(kept_alive=kept_alive, known=frozenset(known))
        self._backend = backend
        self._known = dict(known)
        self._made: dict[int, StorageWeakRef] = {}
        self._operators = Operators()

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and record what it did."""
        _note_subclasses(self.trace, types)
        info = self._operators.of(func)
        if info.is_lift:
            self._remember(args[:1])
        scalars, given = sort_out(info, args, kwargs)
        reads = self._outside(given)
        result = func(*args, **kwargs)
        made = list(tensors_of(result))
        self._remember(made)
        site, called_from = user_sites()
        self.trace.operations.append(
            TracedOperation(
                name=info.name,
                scalars=tuple(scalars),
                shapes=tuple([tuple(tensor.shape) for tensor in made]),
                reads=reads,
                site=site,
                called_from=called_from,
            )
        )
        return result

    def _remember(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.cdata not in self._known:
                self._made.setdefault(storage.cdata, storage)

    def _outside(self, tensors: Iterable[torch.Tensor]) -> tuple[OutsideMemory, ...]:
        found: dict[int, OutsideMemory] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._made:
                found[key] = self._known.get(key) or self._meet(tensor, key)
        return tuple(found.values())

    def _meet(self, tensor: torch.Tensor, key: int) -> OutsideMemory:
        # No operation of this call made the tensor: it is from another thread, a global, numpy or a C++ extension.
        known = OutsideMemory(origin="foreign", name=f"a tensor of {tuple(tensor.shape)}", storage=key)
        self._known[key] = known
        self.trace.kept_alive.append(tensor)
        return known


class RuleRecorder(TraceRecorder):
    """Records one :class:`Trace` with what the rules say, what each operation writes, and whether it draws.

    Enter ``watch.watching()`` too: it adds Python calls that the dispatcher does not show.
    """

    def __init__(
        self,
        backend: Backend,
        known: Mapping[int, OutsideMemory],
        kept_alive: list[object],
        placement: Placement | None,
        own_rules: OwnRules,
    ) -> None:
        super().__init__(backend, known, kept_alive)
        self._rules = RuleChecker(placement, own_rules)
        self._makers: dict[int | None, int] = {}
        self.watch = HostCallWatch(placement=placement, trace=self.trace)

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, judge it and record what it did."""
        info = self._operators.of(func)
        refused = self._rules.judge(info, args, kwargs)
        writes = self._outside(info.written(args, kwargs))
        before = self._rng_state() if info.may_draw else None
        result = super().run(func, types, args, kwargs)
        draws = before is not None and not pytree.has_same_tensors(before, self._rng_state())
        made = list(tensors_of(result))
        self._rules.place(info, args, kwargs, made, is_drawn=draws)
        if draws and self._rules.is_on_host(made):
            draws, refused = False, refused or RawFinding(id="rng", text=HOST_DRAW_TEXT, level="note")
        operation = self.trace.operations[-1]
        self._makers.update(dict.fromkeys(map(storage_key, made), len(self.trace.operations) - 1))
        refused = refused and _at(refused, operation)
        self.trace.operations[-1] = operation._replace(writes=writes, refused=refused, draws=draws)
        return result

    def _rng_state(self) -> Any:
        with self.watch.paused():
            return self._backend.rng_state()

    def outside_of(self, tensor: torch.Tensor) -> OutsideMemory | None:
        """The outside memory in which a tensor lies, or None if the call made the tensor."""
        return next(iter(self._outside([tensor])), None)

    def made_by(self, leaf: Any) -> TracedOperation | None:
        """The last operation that returned a tensor, or None."""
        at = self._makers.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
        return None if at is None else self.trace.operations[at]


class RuleWatch:
    """Records only the operations that the rules refuse or note, and those that make such an operation legal."""

    def __init__(self, placement: Placement | None, own_rules: OwnRules = NO_RULES) -> None:
        self.trace = Trace()
        self.operators = Operators()
        self._rules = RuleChecker(placement, own_rules)

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and judge it."""
        _note_subclasses(self.trace, types)
        info = self.operators.of(func)
        refused = self._rules.judge(info, args, kwargs)
        result = func(*args, **kwargs)
        self._rules.place(info, args, kwargs, list(tensors_of(result)))
        if refused is not None or info.makes_legal:
            site, called_from = user_sites()
            operation = TracedOperation(name=info.name, site=site, called_from=called_from)
            self.trace.operations.append(operation._replace(refused=refused and _at(refused, operation)))
        return result


def _at(found: RawFinding, operation: TracedOperation) -> RawFinding:
    return found if found.site else replace(found, site=operation.site, called_from=operation.called_from)


class TraceMatcher:
    """Compares a call with a recorded one: operations, plain arguments, shapes, and which state they read."""

    def __init__(self, first: Trace, state: Iterable[int | None]) -> None:
        self._expected = iter(first.operations)
        self._state = frozenset(state)
        self._operators = Operators()
        self._is_same = True

    @property
    def is_same(self) -> bool:
        """Whether the calls were the same. Ask after the call."""
        return self._is_same and next(self._expected, None) is None

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and compare it."""
        if not self._is_same:
            return func(*args, **kwargs)
        expected = next(self._expected, None)
        info = self._operators.of(func)
        scalars, given = sort_out(info, args, kwargs)
        reads = {storage_key(tensor) for tensor in given} & self._state
        result = func(*args, **kwargs)
        self._is_same = (
            expected is not None
            and expected.name == info.name
            and expected.scalars == tuple(scalars)
            and expected.shapes == tuple([tuple(tensor.shape) for tensor in tensors_of(result)])
            and reads == {outside.storage for outside in expected.reads if outside.origin == "state"}
        )
        return result


def _note_subclasses(trace: Trace, types: tuple[type, ...]) -> None:
    """Note tensors with their own dispatch, because the audit does not see inside them."""
    for kind in types:
        if kind is not torch.Tensor and not issubclass(kind, _TRANSPARENT):
            trace.subclasses.add(kind.__name__)

"""The dispatch modes that watch one eager call of a model; an audit makes a dozen, each for no more than it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import pytree
from pytest_cudagraph.audit.rule_checks import Operators, RuleChecker, number_of, scalar, sort_out
from pytest_cudagraph.audit.trace import OutsideMemory, Trace, TracedOperation, storage_of
from pytest_cudagraph.backends.dispatch import ObservingMode, hidden_from_compiler, storage_key, tensors_of
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import user_sites

_TRANSPARENT = (torch.nn.Parameter, torch.nn.Buffer)
"""Subclasses in name only, without a dispatch of their own."""


class Watcher(Protocol):
    """What sees every operation of a call, and runs it."""

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``."""


class _Watching(ObservingMode):
    supports_higher_order_operators = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._run = watcher.run

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, types, args, kwargs or {})


def watching(watcher: Watcher) -> ObservingMode:
    """A dispatch mode that hands every operation to ``watcher``."""
    return hidden_from_compiler(_Watching)(watcher)


class TraceRecorder:
    """Writes one whole :class:`Trace`; ``known`` names the memory of inputs and state before the call.

    Without ``judges`` the rules are not asked: a call like one that was judged already.
    """

    def __init__(
        self, backend: Backend, known: Mapping[int, OutsideMemory], kept_alive: list[object], *, judges: bool = True
    ) -> None:
        self.trace = Trace(kept_alive=kept_alive, known=frozenset(known))
        self._backend = backend
        self._judge = RuleChecker(backend, known)
        self._judges = judges
        self._known = dict(known)
        self._made: dict[int, StorageWeakRef] = {}
        self._makers: dict[int | None, int] = {}
        self._operators = Operators()

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and write down what it did."""
        if types:
            note_subclasses(self.trace, types)
        facts = self._operators.get(id(func)) or self._operators.learn(func)
        given: list[torch.Tensor] = []
        scalars: list[Any] = []
        sort_out(args, scalars, given)
        if kwargs:
            sort_out(sorted(kwargs.items()), scalars, given)
        if facts.is_lift:
            self._remember(args[:1])
            scalars.append(scalar(self._judge.lift(args[0])))
        refused, sites = self._judge.judge(facts, args, kwargs, given) if self._judges else (None, None)
        reads = self._outside(given)
        writes = self._outside(facts.written(args, kwargs)) if self._judges else ()
        before = self._backend.rng_state() if facts.may_draw and self._judges else None
        result = func(*args, **kwargs)
        made = list(tensors_of(result))
        self._remember(made)
        if self._judges:
            self._judge.place(facts, given, made)
            self._makers.update(dict.fromkeys(map(storage_key, made), len(self.trace.operations)))
        site, called_from = sites or user_sites()
        self.trace.operations.append(
            TracedOperation(
                name=facts.name,
                scalars=tuple(scalars),
                shapes=tuple([tuple(tensor.shape) for tensor in made]),
                reads=reads,
                writes=writes,
                site=site,
                called_from=called_from,
                refused=refused,
                draws=before is not None and not pytree.has_same_tensors(before, self._backend.rng_state()),
            )
        )
        return result

    def outside_of(self, tensor: torch.Tensor) -> OutsideMemory | None:
        """The outside memory a tensor lies in; None for what the call itself made."""
        found = self._outside([tensor])
        return found[0] if found else None

    def made_by(self, leaf: Any) -> TracedOperation | None:
        """The operation that gave a tensor last; None for what no operation gave."""
        at = self._makers.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
        return None if at is None else self.trace.operations[at]

    def _remember(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.cdata not in self._known:
                self._made.setdefault(storage.cdata, storage)

    def _outside(self, tensors: Iterable[torch.Tensor]) -> tuple[OutsideMemory, ...]:
        found: dict[int, OutsideMemory] = {}
        for tensor in tensors:
            identity = storage_key(tensor)
            if identity is not None and identity not in self._made:
                found[identity] = self._known.get(identity) or self._meet(tensor, identity)
        return tuple(found.values()) if found else ()

    def _meet(self, tensor: torch.Tensor, identity: int) -> OutsideMemory:
        # A tensor nobody made under our eyes: from another thread, a global, numpy or a C++ extension.
        known = OutsideMemory(origin="foreign", name=f"a tensor of {tuple(tensor.shape)}", storage=identity)
        self._known[identity] = known
        self.trace.kept_alive.append(tensor)
        return known


class RuleWatch:
    """Writes down only what the rules have something to say of, and what makes such a thing legal."""

    def __init__(self, backend: Backend, known: Mapping[int, OutsideMemory]) -> None:
        self.trace = Trace()
        self._judge = RuleChecker(backend, known)
        self._operators = Operators()

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and judge it."""
        if types:
            note_subclasses(self.trace, types)
        facts = self._operators.get(id(func)) or self._operators.learn(func)
        given: list[torch.Tensor] = []
        sort_out((*args, *kwargs.values()), [], given)
        if facts.is_lift:
            self._judge.lift(args[0])
        refused, sites = self._judge.judge(facts, args, kwargs, given)
        result = func(*args, **kwargs)
        self._judge.place(facts, given, list(tensors_of(result)))
        if refused is not None or facts.is_legal_beside:
            site, called_from = sites or user_sites()
            self.trace.operations.append(
                TracedOperation(name=facts.name, site=site, called_from=called_from, refused=refused)
            )
        return result


class TraceMatcher:
    """Compares a call with one that was recorded, and remembers only whether it was the same.

    That is operations, plain arguments, shapes, and which pieces of the state are read.
    """

    def __init__(self, first: Trace, state: Iterable[int | None]) -> None:
        self._expected = iter(first.operations)
        self._state = frozenset(state)
        self._operators = Operators()
        self._is_same = True

    @property
    def is_same(self) -> bool:
        """To be asked after the call."""
        return self._is_same and next(self._expected, None) is None

    def run(self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and compare it."""
        if not self._is_same:
            return func(*args, **kwargs)
        expected = next(self._expected, None)
        given: list[torch.Tensor] = []
        scalars: list[Any] = []
        facts = self._operators.get(id(func)) or self._operators.learn(func)
        sort_out(args, scalars, given)
        if kwargs:
            sort_out(sorted(kwargs.items()), scalars, given)
        if facts.is_lift:
            scalars.append(scalar(number_of(args[0])))
        reads = {storage_key(tensor) for tensor in given} & self._state
        result = func(*args, **kwargs)
        self._is_same = (
            expected is not None
            and expected.name == facts.name
            and expected.scalars == tuple(scalars)
            and expected.shapes == tuple([tuple(tensor.shape) for tensor in tensors_of(result)])
            and reads == {outside.storage for outside in expected.reads if outside.origin == "state"}
        )
        return result


def note_subclasses(trace: Trace, types: tuple[type, ...]) -> None:
    """Take note of tensors with a dispatch of their own, whose inside is not seen."""
    for kind in types:
        if kind is not torch.Tensor and not issubclass(kind, _TRANSPARENT):
            trace.subclasses.add(kind.__name__)

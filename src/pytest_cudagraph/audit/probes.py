"""The calls of the model for the audit, each from a known state. The audit puts everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.audit.findings import is_explained, refused_in
from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.audit.observer import RuleRecorder, RuleWatch, TraceMatcher, TraceRecorder, observing
from pytest_cudagraph.audit.trace import (
    Generators,
    Origin,
    OutsideMemory,
    ProbeResults,
    Trace,
    differences,
    storage_of,
)
from pytest_cudagraph.backends.capture_mode import claims_capture, replaced, storage_key
from pytest_cudagraph.backends.placement import Placement
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import container_changes
from pytest_cudagraph.inputs.new_values import Like
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.values import Site

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
    gpu_branches: list[Site] = field(default_factory=list)
    """Lines of the first call that branch on ``is_cuda``, which was false."""
    _of_state: tuple[Held, dict[int, OutsideMemory], list[object]] | None = None

    def held(self) -> Held:
        """The current state."""
        return state.live(self.model, extras=self.extras)

    def record_first(self, example: Example, held: Held) -> Trace:
        """A whole trace with the rules, the changes to containers, and the outputs that lie outside."""
        given = inputs.clone(example)
        known, kept_alive = self._known(given, held)
        recorder = RuleRecorder(self.backend, known, kept_alive, self._placement(known))
        before = pytree.named_leaves((given.args, given.kwargs))
        output = self._call(given, _both(recorder.watch.watching(), observing(recorder)))
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
        self._call(given, observing(recorder))
        return recorder.trace

    def judge(self, example: Example, held: Held, *, by_parts: bool = False, as_on_gpu: bool = False) -> Trace:
        """A trace with the findings of the rules only.

        ``by_parts``: outside inference mode, which keeps composite operations whole. Where the model itself is in
        inference mode, they are split. ``as_on_gpu``: on the branches that only a GPU takes.
        """
        given = inputs.clone(example)
        placement = self._placement(self._known(given, held)[0], sees_moves=not by_parts)
        rules = RuleWatch(placement)
        observed = observing(rules, by_parts=rules.operators if by_parts else None)
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
        self._call(inputs.clone(example), observing(matcher))
        return matcher.is_same

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
        return Placement(device, kept=known.keys() - device, sees_moves=sees_moves)

    def _call(
        self, given: Example, watched: AbstractContextManager[Any], mode: AbstractContextManager[Any] | None = None
    ) -> Any:
        self.backend.set_rng_state(self.seeded)
        with mode or self.backend.running(), watched:
            return self.model(*given.args, **given.kwargs)


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


_OTHER_SEED = 1
"""Any seed serves. The other inputs must only differ from the example and from each other."""

_OTHER_INPUTS: dict[Like, str] = {
    "random": "other", "zeros": "zero", "negative": "negative", "large": "large", "permuted": "permuted"
}  # fmt: skip
"""Each kind of other inputs, and its name in evidence."""

_REPEATED = ("the second call", "the third call")
_MORE_CALLS = 4
"""Calls after one that differed from the first. They find a model that differs every third or fourth call."""

_T = TypeVar("_T")


def run_probes(
    model: Model, example: Example, backend: Backend, another: Example | None, constants: state.Constants
) -> ProbeResults:
    """Call the model a dozen times. Leave state, inputs and random generators as they were.

    ``another`` is an example of another batch size. An exception of the first call propagates, because the model fails
    without any graph.
    """
    extras = [leaf for leaf in pytree.flatten((example.args, example.kwargs))[0] if not isinstance(leaf, torch.Tensor)]
    snapshot = state.Snapshot.take(model, extras=extras, constants=constants)
    generators = Generators(backend)
    held = state.live(model, extras=extras)
    registered = _registered(model, held)
    probe = ProbeCall(model=model, backend=backend, extras=extras, seeded=backend.rng_state(), registered=registered)
    with generators.kept(), replaced(claims_capture()):
        try:
            storages = {name: storage_key(tensor) for name, tensor in held.items()}
            seen = ProbeResults(
                first=probe.record_first(example, held),
                generators=generators.moved(),
                changes=snapshot.changes(),
                registered=registered,
                storages=storages,
            )
            seen.not_judged += [f"{name}, neither saved nor compared" for name in snapshot.not_seen]
            _ProbeRuns(probe=probe, snapshot=snapshot, seen=seen, held=held).run_all(example, another)
        finally:
            snapshot.restore()
    return seen


@dataclass(slots=True, kw_only=True)
class _ProbeRuns:
    """Every call after the first."""

    probe: ProbeCall
    snapshot: state.Snapshot
    seen: ProbeResults
    held: Held

    def run_all(self, example: Example, another: Example | None) -> None:
        self._again(example)
        judge = self.probe.judge
        parts = self._anew("the call outside inference mode", lambda: judge(example, self.held, by_parts=True))
        self.seen.refused = refused_in(self.seen.first, parts)
        elsewhere: dict[str, Trace | None] = {}
        if branches := self.probe.gpu_branches:
            what = f"the branch on is_cuda at {branches[0]}"
            elsewhere["on a GPU"] = self._anew(what, lambda: judge(example, self.held, as_on_gpu=True))
        if not is_explained(self.seen):
            for seed, (kind, name) in enumerate(_OTHER_INPUTS.items(), start=_OTHER_SEED):
                self._on_other_inputs(name, inputs.fresh(example, seed, like=kind))
        if another is not None:  # last, because it may make a cache for its size
            elsewhere["another batch size"] = self._at_another_size(another)
        self.seen.elsewhere = {where: found for where, found in elsewhere.items() if found is not None}

    def _again(self, example: Example) -> None:
        """Call twice on the same inputs and seed, and more often if the calls differ. The host's state runs on."""
        seen, probe = self.seen, self.probe
        reads_foreign = any(outside.origin == "foreign" for op in seen.first.operations for outside in op.reads)
        # If the state stays and the call reads nothing else, a comparison with the first call is enough.
        if not seen.changes and not reads_foreign:
            alike = [self._next(what, lambda: probe.is_like(seen.first, example, self.held)) for what in _REPEATED]
            if False not in alike:
                seen.second, seen.third = (seen.first if is_like else None for is_like in alike)
                return
        seen.second = self._next(_REPEATED[0], lambda: probe.record(example, probe.held()))
        seen.third = self._next(_REPEATED[1], lambda: probe.record(example, probe.held()))
        for _ in range(_MORE_CALLS):
            if seen.second is None or seen.third is None:
                return
            seen.repeated = differences(seen.second, seen.third)
            if seen.repeated or seen.changes or reads_foreign:
                return
            # One of the calls differed from the first. A difference may come only every few calls, so call again.
            seen.third = self._next("a further call", lambda: probe.record(example, probe.held()))

    def _at_another_size(self, another: Example) -> Trace | None:
        what = "the call at another batch size"
        found = self._anew(what, lambda: self.probe.judge(another, self.held))
        if found is None or not (found.host_calls or any(op.refused for op in found.operations)):
            return found
        # The first call at a size may make a cache from data of the host. The capture comes after it.
        return self._next(what, lambda: self.probe.judge(another, self.probe.held())) or found

    def _on_other_inputs(self, name: str, given: Example) -> None:
        what = f"the call on {name} inputs"
        is_like = self._anew(what, lambda: self.probe.is_like(self.seen.first, given, self.held))
        # A whole record costs twice as much as a comparison.
        if is_like is False:
            found = self._anew(what, lambda: self.probe.record(given, self.held))
            if found is not None:
                self.seen.others[name] = found

    def _next(self, what: str, run: Callable[[], _T]) -> _T | None:
        """Run from the host's state after the last call. The values on the device may be those of the first call."""
        if not (written := self.seen.changes.written):
            return self._try(what, run)
        if self.probe.backend.kind == "cuda":
            # A second step could write past the end of a cache, which ends all work of a GPU.
            self.snapshot.rewinder([name for name in written if self.held[name].is_cuda])()
            return self._try(what, run)
        try:  # on a CPU no tensor tells where it will lie, and an error is harmless
            return run()
        except Exception:
            self.snapshot.rewinder(written)()
            return self._try(what, run)

    def _anew(self, what: str, run: Callable[[], _T]) -> _T | None:
        """Run from the state before the first call."""
        if self.seen.changes or self.seen.repeated:
            self.snapshot.restore()
        return self._try(what, run)

    def _try(self, what: str, run: Callable[[], _T]) -> _T | None:
        """The result of ``run``. If the model raises: None, and a line in ``not_judged``."""
        try:
            return run()
        # The model may refuse other inputs or another mode, which only the audit uses. That is no error.
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self.seen.not_judged.append(f"{what}, which raised {type(error).__name__}: {first_line}")
            return None


def _registered(model: Model, held: dict[str, torch.Tensor]) -> frozenset[str]:
    own = {id(t) for module in state.modules_of(model) for t in (*module.parameters(), *module.buffers())}
    return frozenset(name for name, tensor in held.items() if id(tensor) in own)


@contextmanager
def _no_grad() -> Iterator[None]:
    # Inference mode of a caller keeps composite operations whole, and no_grad alone does not end it.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

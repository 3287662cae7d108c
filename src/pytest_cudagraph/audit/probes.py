"""The calls of the model that the audit looks at, each from a known state; everything is put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.audit.host_calls import HostCall, HostCallWatch, as_if_capturing
from pytest_cudagraph.audit.observer import RuleWatch, TraceMatcher, TraceRecorder, watching
from pytest_cudagraph.audit.trace import (
    Generators,
    Origin,
    OutsideMemory,
    Trace,
    TraceDifference,
    differences,
    storage_of,
)
from pytest_cudagraph.backends.dispatch import storage_key
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import container_changes
from pytest_cudagraph.inputs.new_values import Like
from pytest_cudagraph.protocols import Backend, Model

Held = dict[str, torch.Tensor]
"""The tensors of the state, by name."""


@dataclass(slots=True, kw_only=True)
class ProbeCall:
    """The model and what each of its calls begins from; ``extras`` are opaque inputs, such as a cache."""

    model: Model
    backend: Backend
    extras: list[Any]
    seeded: Any
    _of_state: tuple[Held, dict[int, OutsideMemory], list[object]] | None = None

    def held(self) -> Held:
        """The state as it is now."""
        return state.live(self.model, extras=self.extras)

    def record(self, example: Example, held: Held, *, judges: bool = False) -> Trace:
        """A whole trace; with ``judges`` the rules of a capture too, and what of the output lies outside."""
        given = inputs.clone(example)
        recorder = TraceRecorder(self.backend, *self._known(given, held), judges=judges)
        before = pytree.named_leaves((given.args, given.kwargs)) if judges else []
        output = self._call(given, watching(recorder))
        if judges:
            after = pytree.named_leaves((given.args, given.kwargs))
            recorder.trace.containers += [
                (f"{name} is {how}", recorder.made_by(leaf)) for name, how, leaf in container_changes(before, after)
            ]
        for path, leaf in pytree.named_leaves(output) if judges else ():
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
        outline = TraceMatcher(first, map(storage_key, held.values()))
        self._call(inputs.clone(example), watching(outline))
        return outline.is_same

    def watch(self, example: Example, reads: AbstractContextManager[None]) -> None:
        """A call with torch's own methods watched, and no dispatch mode in the way."""
        self._call(inputs.clone(example), reads)

    def _known(self, given: Example, held: Held) -> tuple[dict[int, OutsideMemory], list[object]]:
        """The memory of state and inputs by its identity, and what keeps those identities from serving again."""
        if self._of_state is None or self._of_state[0] is not held:
            self._of_state = (held, *_memory("state", held.items()))
        _, of_state, state_alive = self._of_state
        passed = [(f"args{path}", leaf) for path, leaf in pytree.named_leaves(given.args)]
        passed += [(f"kwargs{path}", leaf) for path, leaf in pytree.named_leaves(given.kwargs)]
        of_inputs, inputs_alive = _memory("input", passed)
        return {**of_inputs, **of_state}, [*held.values(), *state_alive, *inputs_alive]

    def _call(
        self, given: Example, watched: AbstractContextManager[Any], mode: AbstractContextManager[Any] | None = None
    ) -> Any:
        self.backend.set_rng_state(self.seeded)
        with mode or self.backend.running(), watched:
            return self.model(*given.args, **given.kwargs)


def _memory(origin: Origin, named: Iterable[tuple[str, Any]]) -> tuple[dict[int, OutsideMemory], list[object]]:
    known: dict[int, OutsideMemory] = {}
    # What the call frees (an input taken out of a dict, a parameter whose data is replaced) must not serve again
    # under the same identity: references to the storages see to that without holding the memory.
    kept_alive: list[object] = []
    for name, value in named:
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            known.setdefault(storage.cdata, OutsideMemory(origin=origin, name=name, storage=storage.cdata))
            kept_alive.append(storage)
    return known, kept_alive


_OTHER_SEED = 1
"""Any seed will do: the other inputs only have to differ from the example."""

_OTHER_INPUTS: dict[Like, str] = {
    "random": "other",
    "zeros": "zero",
    "negative": "negative",
    "large": "large",
    "permuted": "permuted",
}
"""Each kind of other inputs, and how it is called."""

_REPEATED = ("the second call", "the third call")
_MORE_CALLS = 4
"""After a call that was unlike the first; a model that parts ways every third or fourth call is found by then."""

_T = TypeVar("_T")
Explained = Callable[["ProbeResults"], bool]


@dataclass(slots=True, kw_only=True)
class ProbeResults:
    """What the calls showed. A call that raised is None, with a line in ``not_judged``."""

    first: Trace
    """In the mode in which graphs are captured; composite operations show as a whole."""
    changes: state.Changes
    """What the first call changed of the state."""
    registered: frozenset[str]
    """The names of parameters and buffers among the state."""
    storages: dict[str, int | None]
    """The memory of every tensor of the state, by name."""
    generators: tuple[str, ...] = ()
    """The generators of random numbers that the first call moved, by name."""
    second: Trace | None = None
    third: Trace | None = None
    """The same inputs and seed again, while Python's own state (counters, ``random``, clocks) runs on."""
    repeated: tuple[TraceDifference, ...] = ()
    """What differs between the second call and the third."""
    others: dict[str, Trace] = field(default_factory=dict)
    """Other inputs of the same shapes, from the state of the first call: each kind that did not do what that did."""
    parts: Trace | None = None
    """Under ``no_grad``, where composite operations show as their parts."""
    beside: dict[str, Trace] = field(default_factory=dict)
    """What the rules say elsewhere: at another batch size, on the branches that only a GPU takes."""
    host_calls: list[HostCall] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)


def run_probes(
    model: Model, example: Example, backend: Backend, another: Example | None, explained: Explained
) -> ProbeResults:  # fmt: skip
    """Call the model a dozen times; state, inputs and random generators are left as they were.

    ``another`` is an example of another batch size. ``explained`` tells, after the calls on the same inputs, whether
    what other inputs may show is already known. What the model raises at the first call is not caught: it fails
    without any graph.
    """
    extras = [leaf for leaf in pytree.flatten((example.args, example.kwargs))[0] if not isinstance(leaf, torch.Tensor)]
    snapshot = state.Snapshot.take(model, extras=extras)
    generators = Generators(backend)
    stage = ProbeCall(model=model, backend=backend, extras=extras, seeded=backend.rng_state())
    with generators.kept(), as_if_capturing():
        try:
            held = stage.held()
            registered = _registered(model, held)
            storages = {name: storage_key(tensor) for name, tensor in held.items()}
            seen = ProbeResults(
                first=stage.record(example, held, judges=True),
                generators=generators.moved(),
                changes=snapshot.changes(),
                registered=registered,
                storages=storages,
            )
            seen.not_judged += [f"{name}, neither saved nor compared" for name in snapshot.not_seen]
            _ProbeRuns(stage=stage, snapshot=snapshot, seen=seen, held=held).run_all(example, another, explained)
        finally:
            snapshot.restore()
    return seen


@dataclass(slots=True, kw_only=True)
class _ProbeRuns:
    """Every call after the first."""

    stage: ProbeCall
    snapshot: state.Snapshot
    seen: ProbeResults
    held: Held

    def run_all(self, example: Example, another: Example | None, explained: Explained) -> None:
        self._again(example)
        parts = "the call outside inference mode"
        self.seen.parts = self._anew(parts, lambda: self.stage.judge(example, self.held, _no_grad()))
        self._watch(example)
        if another is not None:
            self._beside("another batch size", "the call at another batch size", another)
        if not explained(self.seen):
            for kind, name in _OTHER_INPUTS.items():
                self._on_other_inputs(name, inputs.fresh(example, _OTHER_SEED, like=kind))

    def _again(self, example: Example) -> None:
        """The same inputs and seed, while Python's own state runs on: twice, and oftener where the calls differ."""
        seen, stage = self.seen, self.stage
        reads_foreign = any(outside.origin == "foreign" for op in seen.first.operations for outside in op.reads)
        # Where the state stays and nothing else is read, it is enough to ask whether each call is like the first.
        if not seen.changes and not reads_foreign:
            alike = [self._try(what, lambda: stage.is_like(seen.first, example, self.held)) for what in _REPEATED]
            if False not in alike:
                seen.second, seen.third = (seen.first if is_like else None for is_like in alike)
                return
        seen.second = self._try(_REPEATED[0], lambda: stage.record(example, stage.held()))
        seen.third = self._try(_REPEATED[1], lambda: stage.record(example, stage.held()))
        for _ in range(_MORE_CALLS):
            if seen.second is None or seen.third is None:
                return
            seen.repeated = differences(seen.second, seen.third)
            if seen.repeated or seen.changes or reads_foreign:
                return
            # One of the calls was unlike the first: what comes once in a while is waited for.
            seen.third = self._try("a further call", lambda: stage.record(example, stage.held()))

    def _watch(self, example: Example) -> None:
        """With torch's own methods watched; where a branch asks for a GPU, once more as if tensors lay on one."""
        reads = HostCallWatch(on_gpu=self.stage.backend.kind == "cuda")
        self._anew("the call watched for host reads", lambda: self.stage.watch(example, reads.watching()))
        self.seen.host_calls += reads.host_calls
        if reads.gpu_branches:
            pretending = HostCallWatch(on_gpu=False, as_on_gpu=True)
            mode = _both(self.stage.backend.running(), pretending.watching())
            self._beside("on a GPU", f"the branch on is_cuda at {reads.gpu_branches[0]}", example, mode)
            self.seen.host_calls += pretending.host_calls

    def _beside(
        self, name: str, what: str, example: Example, mode: AbstractContextManager[None] | None = None
    ) -> None:  # fmt: skip
        found = self._anew(what, lambda: self.stage.judge(example, self.held, mode))
        if found is not None:
            self.seen.beside[name] = found

    def _on_other_inputs(self, name: str, given: Example) -> None:
        what = f"the call on {name} inputs"
        is_like = self._anew(what, lambda: self.stage.is_like(self.seen.first, given, self.held))
        # To record a call whole costs twice as much: only where there is something to tell.
        if is_like is False:
            found = self._anew(what, lambda: self.stage.record(given, self.held))
            if found is not None:
                self.seen.others[name] = found

    def _anew(self, what: str, run: Callable[[], _T]) -> _T | None:
        """From the state before the first call; where no call changes it, that is the state there is."""
        if self.seen.changes or self.seen.repeated:
            self.snapshot.restore()
        return self._try(what, run)

    def _try(self, what: str, run: Callable[[], _T]) -> _T | None:
        """The result of ``run``; None, and a line, when the model raises."""
        try:
            return run()
        # The model may refuse what only the audit asks of it (other inputs, another mode): said, and passed over.
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self.seen.not_judged.append(f"{what}, which raised {type(error).__name__}: {first_line}")
            return None


def _registered(model: Model, held: dict[str, torch.Tensor]) -> frozenset[str]:
    own = {id(t) for module in state.modules_of(model) for t in (*module.parameters(), *module.buffers())}
    return frozenset(name for name, tensor in held.items() if id(tensor) in own)


@contextmanager
def _no_grad() -> Iterator[None]:
    # Inference mode of a caller would keep composite operations whole: no_grad alone does not leave it.
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

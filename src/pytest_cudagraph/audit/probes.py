"""The calls of the model for the audit, each from a known state. The audit puts everything back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pytest_cudagraph import inputs, pytree, state
from pytest_cudagraph.audit.findings import ends_audit, is_explained, refused_in
from pytest_cudagraph.audit.probe_call import Held, ProbeCall
from pytest_cudagraph.audit.python_watch import PythonWatch
from pytest_cudagraph.audit.rule_checks import OwnRules
from pytest_cudagraph.audit.trace import Generators, ProbeResults, Trace, differences
from pytest_cudagraph.backends.capture_mode import claims_capture, replaced, storage_key
from pytest_cudagraph.backends.device_asserts import TrapGuard
from pytest_cudagraph.errors import first_line
from pytest_cudagraph.hazards import RawFinding
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.new_values import Like
from pytest_cudagraph.protocols import Backend, Model

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
    model: Model,
    example: Example,
    backend: Backend,
    another: Example | None,
    constants: state.Constants,
    own_rules: OwnRules,
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
    seeded = backend.rng_state()
    probe = ProbeCall(
        model=model, backend=backend, extras=extras, seeded=seeded, registered=registered, own_rules=own_rules
    )
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
        self.seen.refused = refused_in(self.seen.first, None)
        if ends_audit(self.seen):
            return
        self._again(example)
        judge = self.probe.judge
        parts = self._anew("the call outside inference mode", lambda: judge(example, self.held, by_parts=True))
        self.seen.refused = refused_in(self.seen.first, parts)
        elsewhere: dict[str, Trace | None] = {}
        if branches := self.probe.gpu_branches:
            what = f"the branch on is_cuda at {branches[0]}"
            elsewhere["on a GPU"] = self._anew(what, lambda: judge(example, self.held, as_on_gpu=True))
        if not is_explained(self.seen):
            for name, other in _other_inputs(example):
                self._on_other_inputs(name, other)
        if another is not None:  # last, because it may make a cache for its size
            elsewhere["another batch size"] = self._at_another_size(another)
        self.seen.elsewhere = {where: found for where, found in elsewhere.items() if found is not None}

    def _again(self, example: Example) -> None:
        """Call twice on the same inputs and seed, and more often if the calls differ. The host's state runs on."""
        seen, probe = self.seen, self.probe
        reads_foreign = any(outside.origin == "foreign" for op in seen.first.operations for outside in op.reads)
        # If the state stays and the call reads nothing else, a comparison with the first call is enough.
        if not seen.changes and not reads_foreign:
            alike = self._twice(lambda: probe.is_like(seen.first, example, self.held))
            if False not in alike:
                seen.second, seen.third = (seen.first if is_like else None for is_like in alike)
                return
        seen.second, seen.third = self._twice(lambda: probe.record(example, probe.held()))
        for _ in range(_MORE_CALLS):
            if seen.second is None or seen.third is None:
                return
            seen.repeated = differences(seen.second, seen.third)
            if seen.repeated or seen.changes or reads_foreign:
                return
            # One of the calls differed from the first. A difference may come only every few calls, so call again.
            seen.third = self._next("a further call", lambda: probe.record(example, probe.held()))

    def _twice(self, run: Callable[[], _T]) -> tuple[_T | None, _T | None]:
        """The second call and the third. What moves between them moves with each call."""
        if sys.getprofile() is not None:
            self.seen.not_judged.append("branches on moving Python values, reads of the date: a profiler runs")
        watch = self.probe.python_watch = PythonWatch()
        second = self._next(_REPEATED[0], run)
        self.probe.python_watch = None
        attributes, variables = self._attributes(), watch.globals()
        third = self._next(_REPEATED[1], run)
        moved = _moved(attributes, self._attributes()), _moved(variables, watch.globals())
        self.seen.warnings = watch.warnings(self.seen.first, *moved)
        return second, third

    def _attributes(self) -> dict[str, str]:
        """The changes of plain values since the first call, in words, by name. Empty if that call changed none."""
        texts = self.snapshot.changes(values=False).python if self.seen.changes.python else ()
        return {text.partition(": ")[0].removeprefix("len(").removesuffix(")"): text for text in texts}

    def _at_another_size(self, another: Example) -> Trace | None:
        what = "the call at another batch size"
        found = self._anew(what, lambda: self.probe.judge(another, self.held))
        if found is None or not (found.host_calls or any(op.refused for op in found.operations)):
            return found
        # The first call at a size may make a cache from data of the host. The capture comes after it.
        return self._next(what, lambda: self.probe.judge(another, self.probe.held())) or found

    def _on_other_inputs(self, name: str, other: Example) -> None:
        what = f"the call on {name} inputs"
        is_like = self._anew(what, lambda: self._guarded(lambda: self.probe.is_like(self.seen.first, other, self.held)))
        # A whole record costs twice as much as a comparison.
        if is_like is False:
            found = self._anew(what, lambda: self._guarded(lambda: self.probe.record(other, self.held)))
            if found is not None:
                self.seen.others[name] = found
                self._keep_if_unrepeated(name, found)

    def _keep_if_unrepeated(self, name: str, repeated: Trace) -> None:
        """Warn if only the first of two equal calls differed: a call of some number does, the repetition does not."""
        if not differences(self.seen.first, repeated):
            text = f"a call on {name} inputs did something else, and its repetition did not"
            self.seen.warnings = (*self.seen.warnings, RawFinding(id="control-flow", level="warning", text=text))

    def _guarded(self, run: Callable[[], _T]) -> _T:
        """Run on inputs that the user did not give. On a GPU, raise before an operation that would end its work."""
        with TrapGuard() if self.probe.backend.kind == "cuda" else nullcontext():
            return run()

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
            self.seen.not_judged.append(f"{what}, which raised {first_line(error)}")
            return None


def _other_inputs(example: Example) -> Iterator[tuple[str, Example]]:
    """Other inputs of the same form, by name. Those that the user draws, where there are such."""
    kinds: Mapping[Like, str] = _OTHER_INPUTS if example.drawing is None else {"random": "other drawn"}
    for seed, (kind, name) in enumerate(kinds.items(), start=_OTHER_SEED):
        yield name, inputs.fresh(example, seed, like=kind)


def _registered(model: Model, held: dict[str, torch.Tensor]) -> frozenset[str]:
    own = {id(t) for module in state.modules_of(model) for t in (*module.parameters(), *module.buffers())}
    return frozenset(name for name, tensor in held.items() if id(tensor) in own)


def _moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names with another value. A NaN that stays the same object has not moved."""
    return [name for name in {**before, **after} if (before.get(name),) != (after.get(name),)]

"""The check of one batch size: what is compared, the trials, and what they have shown so far."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.check.check_case import CheckCase, CheckedCall
from pytest_cudagraph.check.differences import (
    explained,
    has_same_outputs,
    has_same_results,
    with_cause,
    with_circumstances,
)
from pytest_cudagraph.check.initial_state import CallResult, Change, InitialState
from pytest_cudagraph.errors import CudagraphError, DeadTensorError, InputError, first_line
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import opaque_arguments
from pytest_cudagraph.values import Agreement, Disagreement

_FROM_THE_EXAMPLE = (
    "they have the shapes, dtypes and value ranges of the example. Booleans, masks and ascending\n"
    "  integers are copied from the example\n"
    "  to fix: give an example that spans what the model takes, or draw=... for the values"
)
_DRAWN = "draw= gave them\n  to fix: draw what the model takes"


_VOID = (
    "outputs do not depend on the inputs, so the check proves almost nothing. If the last layer is zero, as before "
    "training, initialise it with other values"
)


SLOW_S = 0.05
"""From here on a test of four batch sizes would take minutes, so that fewer calls are made."""


class BatchCheck:
    """Checks one batch size, trial by trial. The first disagreement ends it."""

    def __init__(self, case: CheckCase) -> None:
        self.case = case
        self.agreed: CheckedCall | None = None
        """The last call of :meth:`trial` that agreed. None after a disagreement: then nothing more is tried."""
        self.is_repeatable = True
        """Whether every second eager run gave the same bits as the first."""
        self.has_repeated = False
        """Whether a second eager run gave the same bits."""
        self.eager_s = 0.0
        """The time of the last eager call on new inputs."""
        self._disagreement: Disagreement | None = None
        self._trials: list[tuple[Example, CallResult]] = []
        self._adversaries: list[str] = []
        self._notes: dict[str, None] = {}  # an ordered set
        self._not_judged: list[str] = []
        self._replays = 0
        self._bit_exact = True
        self._previous: CallResult | None = None

    def trial(self, seed: int, *, repeats_elsewhere: bool = False) -> None:
        """Run eager twice and replay once on new inputs. Does nothing after a disagreement.

        A slow model runs once where an earlier trial, or one of another size (``repeats_elsewhere``), gave the same
        bits twice. If replay then differs, and so does a second eager run, the trial is made anew with both.
        """
        if self._disagreement is not None:
            return
        example = self._new_inputs(seed)
        eager = self._run_eager(example, seed)
        is_known = (bool(self._trials) or repeats_elsewhere) and self.is_slow and self.is_repeatable
        again = eager if is_known else self._run_eager(example, seed)
        self._trials.append((example, replace(eager, state={})))  # which may be a large cache
        difference = self.case.comparison.unrepeatable(eager, again)
        if difference is not None:
            self.end_with(difference)
            return
        noise = self.case.comparison.noise_of(eager, again)
        self._note_eager(eager, again, noise)
        self.has_repeated |= again is not eager and self.is_repeatable
        self._set_aside_unread(example, seed, eager)
        replay = self._compared_replay(example, seed, eager, noise)
        if isinstance(replay, Disagreement):
            if self._turns_out_noisy(example, seed, eager):
                self.trial(seed + 1)  # on other inputs, which show a replay of stale ones
                return
            self.end_with(replay)
        else:
            self.agreed = CheckedCall(example=example, seed=seed, eager=eager, noise=noise, replay=replay)

    def adversarial_trial(
        self, kind: str, example: Example, seed: int, expected: CallResult, noise: Mapping[str, float]
    ) -> bool:
        """Replay once on inputs of this kind. Whether the result agrees with ``expected``."""
        replay = self._compared_replay(example, seed, expected, noise)
        if isinstance(replay, Disagreement):
            self.end_with(replace(replay, evidence=(*replay.evidence, f"the inputs: {kind}")))
            return False
        self._adversaries.append(kind)
        return True

    def recheck_earlier(self) -> None:
        """Compare the copies of the last agreed call again, then repeat the call."""
        agreed = self.agreed
        if agreed is None:
            return
        changed = self.case.comparison.first_difference(agreed.eager, agreed.replay, agreed.noise)
        if changed is not None:
            cause = "a copy of an earlier result has changed: a later replay wrote to memory outside its graph"
            self.end_with(with_cause(changed, cause))
            return
        replay = self._compared_replay(agreed.example, agreed.seed, agreed.eager, agreed.noise)
        if isinstance(replay, Disagreement):
            if self._turns_out_noisy(agreed.example, agreed.seed, agreed.eager):
                self.trial(agreed.seed + 1)
                self.recheck_earlier()
                return
            cause = "the same inputs give another result after replays of other inputs and batch sizes"
            self.end_with(with_cause(replay, cause))

    def check_constants(self) -> None:
        """End the check if a call wrote to a parameter that no eager call on the example wrote to."""
        if (lost := self.case.start.lost()) and self._disagreement is None:
            self.end_with(self.case.comparison.written(lost))

    def replay(self, example: Example, seed: int, *, change: Change | None = None) -> CallResult:
        """Replay once with poisoned outputs, from the initial state. ``change``: see :meth:`InitialState.run`.

        Raises :class:`DeadTensorError` from the graph, and :class:`CudagraphError` from anything else it raises.
        """
        graph, start = self.case.graph, self.case.start
        start.poison(graph)  # first, since an output may share its memory with state
        self._replays += 1
        try:
            return start.run(graph, example, seed, change=change)
        except DeadTensorError:
            raise  # a verdict on the model
        except (RuntimeError, CudagraphError) as error:
            raise CudagraphError(f"batch {self.case.batch_size}: replay raised {first_line(error)}") from error

    def note(self, text: str) -> None:
        """Add a note that weakens or qualifies the agreement. Each text appears once."""
        self._notes[text] = None

    @property
    def is_slow(self) -> bool:
        """Whether eager calls take so long that fewer are made."""
        return self.eager_s > SLOW_S

    @property
    def is_tried_on_new_inputs(self) -> bool:
        """Whether the first trial had other inputs than the capture."""
        return bool(self._trials) and not inputs.has_same_inputs(self._trials[0][0], self.case.example)

    def leave_unjudged(self, what: str) -> None:
        """Add what the check cannot see."""
        self._not_judged.append(what)

    def end_with(self, disagreement: Disagreement, start: InitialState | None = None) -> None:
        """Replay differs from eager: end the check. ``start`` is the state of the call that shows it."""
        example, _ = self._trials[-1]
        assigned = (start or self.case.start).located(disagreement.assigned, self.case.eager, example)
        self._disagreement, self.agreed = replace(disagreement, assigned=assigned), None
        self.case.start.lost()  # the difference is the verdict, and not that its effect cannot be undone

    def result(self) -> Agreement | Disagreement:
        """The disagreement, or what all trials have shown."""
        if self._disagreement is not None:
            return self._disagreement
        (first_inputs, first), (last_inputs, last) = self._trials[0], self._trials[-1]
        is_single = len(self._trials) == 1
        has_new_inputs = not inputs.has_same_inputs(self.case.example if is_single else first_inputs, last_inputs)
        if not has_new_inputs:
            cannot = "the inputs hold nothing that can be drawn again: the check cannot detect stale inputs"
            self.note(f"{cannot}. draw= can give others")
        objects = opaque_arguments([first_inputs]) if has_new_inputs and first_inputs.drawing is None else {}
        for name, value in objects.items():
            self.note(f"{name} ({type(value).__name__}) is the same object in every trial: draw= can give others")
        is_void = has_new_inputs and not is_single and bool(last.outputs) and has_same_outputs(first, last)
        return Agreement(
            batch_size=self.case.batch_size,
            replays=self._replays,
            leaves=last.tensor_count,
            state_tensors=len(self.case.start.tensors),
            bit_exact=self._bit_exact,
            eager_repeatable=self.is_repeatable,
            not_compared=(*last.opaque_places, *self.case.start.not_seen),
            warnings=(_VOID,) if is_void else (),
            notes=tuple(self._notes),
            not_judged=tuple(self._not_judged),
            adversaries=tuple(self._adversaries),
        )

    def _compared_replay(
        self, example: Example, seed: int, expected: CallResult, noise: Mapping[str, float]
    ) -> CallResult | Disagreement:
        """Replay once: the result if it agrees with ``expected``, otherwise the explained disagreement."""
        case, launches = self.case, self.case.graph.replays
        try:
            replay = self.replay(example, seed)
        except DeadTensorError as error:
            message, *evidence = (line.strip() for line in str(error).splitlines())
            dead = case.comparison.disagreement("graph", message, tuple(evidence), "rebinds-state")
            return self._with_circumstances(dead, expected)
        if case.graph.replays <= launches:
            return case.comparison.disagreement("graph", "the call returned without launching the graph")
        difference = case.comparison.first_difference(expected, replay, noise)
        difference = difference or self._generator_difference(expected, replay)
        if difference is not None:
            suspects = self._suspects(example, seed)
            poison = functools.partial(case.start.poison, case.graph)
            cause = explained(difference, expected, replay, poison=poison, suspects=suspects)
            return self._with_circumstances(cause, expected)
        self._bit_exact &= case.comparison.is_bit_exact(expected, replay)
        self._previous = replace(expected, state={})
        return replay

    def _with_circumstances(self, disagreement: Disagreement, eager: CallResult) -> Disagreement:
        is_opaque = self.case.graph.receipt.opaque_regions > 0
        return with_circumstances(disagreement, eager, moved=self.case.moved, is_opaque=is_opaque)

    def _run_eager(self, example: Example, seed: int) -> CallResult:
        begin_s = time.perf_counter()
        try:
            result = self.case.start.run(self.case.eager, example, seed)
        # The user's model may raise anything. The new inputs are the cause.
        except Exception as error:
            raise InputError(
                f"batch {self.case.batch_size}: eager raises on fresh inputs: {first_line(error)}\n"
                f"  {_FROM_THE_EXAMPLE if example.drawing is None else _DRAWN}"
            ) from error
        self.eager_s = time.perf_counter() - begin_s
        return result

    def _turns_out_noisy(self, example: Example, seed: int, eager: CallResult) -> bool:
        """Whether one more eager run gives other bits, where it ran only once. The next trial then runs it twice."""
        if self.has_repeated or not self.is_repeatable:
            return False
        self.is_repeatable = self.case.comparison.is_bit_exact(eager, self._run_eager(example, seed))
        return not self.is_repeatable

    def _new_inputs(self, seed: int) -> Example:
        """New random inputs. If none could be drawn, a constant integer is lowered by one, if eager accepts that."""
        example = inputs.fresh(self.case.example, seed)
        is_given = self.case.example.drawing is not None
        if is_given or not self._trials or not inputs.has_same_inputs(example, self._trials[-1][0]):
            return example
        lowered = inputs.lowered(example)
        try:
            is_accepted = not self.case.start.run(self.case.eager, lowered, seed).nan_places
        # The user's model may raise anything: it does not accept this number.
        except Exception:
            return example
        return lowered if is_accepted else example

    def _generator_difference(self, eager: CallResult, replay: CallResult) -> Disagreement | None:
        """Whether the next random number differs after a replay. Compiled code may draw in its own order."""
        if pytree.has_same_tensors(eager.generators, replay.generators):
            return None
        if self.case.graph.receipt.opaque_regions:
            self.note("compiled code leaves the random generators in another state than eager: later numbers differ")
            return None
        return self.case.comparison.other_generators(eager, replay)

    def _suspects(self, example: Example, seed: int) -> Iterator[tuple[str, CallResult]]:
        """Results that a stale replay would return, the likeliest first."""
        if self._previous is not None:
            yield "stale input: replay returns eager's result for the previous inputs", self._previous
        at_capture = self.case.start.run(self.case.eager, self.case.example, seed)
        yield "stale input: replay returns eager's result for the inputs of capture", at_capture

    def _note_eager(self, eager: CallResult, again: CallResult, noise: Mapping[str, float]) -> None:
        self.is_repeatable &= self.case.comparison.is_bit_exact(eager, again)
        for where in eager.nan_places:
            self.note(f"eager itself gives NaN in {where} (NaN counts as equal to NaN)")
        for name in eager.inputs:
            self.note(f"eager changes its argument {name} in place, replay changes the graph's copy of it")
        if eager.python:
            self.note("eager changes Python values of the model, replay does not")
        if noise:
            where = max(noise, key=lambda place: noise[place])
            self.note(
                "eager is not repeatable: two runs from the same state, inputs and seed differ, most in "
                f"{where} (twice this difference was allowed)"
            )

    def _set_aside_unread(self, example: Example, seed: int, eager: CallResult) -> None:
        """Do not compare plain tensors that eager replaces and does not read: no result depends on the old ones."""
        comparison = self.case.comparison
        replaced = self.case.start.replaced_by(eager).items()
        asked = ((name, fill) for name, fill in replaced if name not in comparison.unread)
        unread = {name for name, fill in asked if self._is_unread(fill, example, seed, eager)}
        if unread:
            self.case = replace(self.case, comparison=replace(comparison, unread=comparison.unread | unread))
            names = ", ".join(sorted(unread))
            self.note(f"eager replaces {names}, replay does not. No call reads what an earlier one left there")

    def _is_unread(self, fill: Change, example: Example, seed: int, eager: CallResult) -> bool:
        try:
            other = self.case.start.run(self.case.eager, example, seed, change=fill, records_state=True)
        # The tensor cannot be filled, or the user's model does not accept the values.
        except Exception:
            return False
        return has_same_results(eager, other)

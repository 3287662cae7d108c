"""One batch size on its way through the check: its trials, and what they have shown so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.check import differences
from pytest_cudagraph.check.compare import TensorDifference, Tolerance
from pytest_cudagraph.check.differences import Suspect, explain, with_cause
from pytest_cudagraph.check.initial_state import CallResult, InitialState
from pytest_cudagraph.errors import CudagraphError, DeadTensorError, InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import CapturedGraph, Model
from pytest_cudagraph.pytree import same_bits
from pytest_cudagraph.values import Agreement, Disagreement

_OTHER_RANDOM_NUMBERS = (
    "eager draws random numbers here, and compiled code draws others from the same seed "
    "(torch._inductor.config.fallback_random makes them equal)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """What is held against each other at one batch size, and the start that both sides share."""

    batch_size: int
    graph: CapturedGraph
    eager: Model
    captured: Model
    """What the graph was captured from: compiled code, or eager itself."""
    example: Example
    dims: Sequence[int | None]
    """For each leaf of the example the dimension of its rows; None where it has none."""
    start: InitialState
    tolerance: Tolerance
    moved: tuple[str, ...]
    """State that lies at another address than at capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """One question and both answers. ``noise``: how far two runs of eager lie apart, by place."""

    example: Example
    seed: int
    eager: CallResult
    replay: CallResult
    noise: Mapping[str, float]


class BatchCheck:
    """The trials of one batch size. It ends with the first difference."""

    def __init__(self, check_case: CheckCase) -> None:
        self.check_case = check_case
        self.disagreement: Disagreement | None = None
        self.last: CheckedCall | None = None
        """The last question on ordinary inputs that replay answered as eager did."""
        self.adversaries: list[str] = []
        """The kinds of adversarial inputs that replay answered as eager did."""
        self.is_repeatable = True
        """Whether eager has given the same bits twice each time."""
        self._previous: CallResult | None = None
        self._eager: list[CallResult] = []
        self._examples: list[Example] = []
        self._bit_exact = True
        self._replays = 0
        self._notes: dict[str, None] = {}  # a set that keeps its order
        self._before = check_case.start.tensors

    @property
    def has_ended(self) -> bool:
        """Whether a difference was found: nothing more is tried then."""
        return self.disagreement is not None

    @property
    def is_compiled(self) -> bool:
        """Whether the graph holds compiled code, whose numbers are its own."""
        return self.check_case.captured is not self.check_case.eager

    def trial(self, seed: int) -> None:
        """Run eager twice and replay once, on fresh inputs from the same start. Does nothing after a difference."""
        if self.has_ended:
            return
        example = self._unlike_before(inputs.fresh(self.check_case.example, seed), seed)
        eager, again = self._run_eager(example, seed), self._run_eager(example, seed)
        difference = differences.unrepeatable(eager, again, self._before, self.check_case.tolerance)
        if difference is None:
            noise = differences.noise_of(eager, again, self._before)
            self._observe(eager, again, noise)
            question = CheckedCall(example=example, seed=seed, eager=eager, replay=eager, noise=noise)
            difference = self.replayed(question)
        self._eager.append(eager)
        self._examples.append(example)
        if difference is not None:
            self.end_with(difference)

    def replayed(self, question: CheckedCall, *, is_ordinary: bool = True) -> TensorDifference | None:
        """Poison, replay, and hold the answer against the question's ``eager``.

        An ordinary question on which they agree becomes :attr:`last`: what comes later builds on it.
        """
        graph, start = self.check_case.graph, self.check_case.start
        # Poisoned before the state is brought back: an output may share its memory with state.
        start.poison(graph)
        launched = graph.replays
        try:
            replay = self.launched(lambda: start.answer(graph, question.example, question.seed))
        except DeadTensorError as error:
            return self._circumstances(_dead(error), question.eager)
        if graph.replays <= launched:
            return TensorDifference(where="graph", message="the call returned without launching the graph")
        eager, tolerance = question.eager, self.check_case.tolerance
        difference = differences.first_difference(eager, replay, self._before, tolerance, question.noise)
        if difference is None:
            difference = self._other_generators(eager, replay)
        if difference is None:
            self._bit_exact &= differences.is_bit_exact(eager, replay, self._before)
            self.last = replace(question, replay=replay) if is_ordinary else self.last
            self._previous = eager
            return None
        suspects = self._suspects(question.example, question.seed)
        told = explain(difference, eager, replay, lambda: start.poison(graph), suspects)
        return self._circumstances(told, eager)

    def launched(self, launch: Callable[[], CallResult]) -> CallResult:
        """One more replay. Raises :class:`CudagraphError` from what it raises."""
        self._replays += 1
        try:
            return launch()
        except DeadTensorError:
            raise  # a verdict on the model
        except (RuntimeError, CudagraphError) as error:
            raise CudagraphError(f"batch {self.check_case.batch_size}: replay raised {_told(error)}") from error

    def recheck_earlier(self) -> None:
        """See that copies of the last answer still hold, and ask the same again: what came between changes nothing."""
        asked = self.last
        if asked is None or self.has_ended:
            return
        difference = differences.first_difference(
            asked.eager, asked.replay, self._before, self.check_case.tolerance, asked.noise
        )
        if difference is not None:
            message = "a copy of an earlier answer holds other values now: a later replay wrote to memory not its own"
            self.end_with(with_cause(difference, message))
            return
        difference = self.replayed(asked)
        if difference is not None:
            message = "the same inputs give another answer after replays of other inputs and batch sizes"
            self.end_with(with_cause(difference, message))

    def note(self, text: str) -> None:
        """What weakens or qualifies the proof; each text once."""
        self._notes[text] = None

    def end_with(self, difference: TensorDifference) -> None:
        """The verdict: replay differs from eager."""
        self.disagreement = self._disagree(difference)

    def result(self) -> Agreement | Disagreement:
        """What the trials have shown."""
        if self.disagreement is not None:
            return self.disagreement
        self._look_back()
        last = self._eager[-1]
        return Agreement(
            batch_size=self.check_case.batch_size,
            replays=self._replays,
            leaves=differences.count_tensors(last),
            state_tensors=len(self.check_case.start.tensors),
            bit_exact=self._bit_exact,
            eager_repeatable=self.is_repeatable,
            not_compared=(*differences.opaque_places(last), *self.check_case.start.not_seen),
            notes=tuple(self._notes),
            adversaries=tuple(self.adversaries),
        )

    def _run_eager(self, example: Example, seed: int) -> CallResult:
        try:
            return self.check_case.start.answer(self.check_case.eager, example, seed)
        # Whatever the user's model raises, the cause is inputs that it cannot take.
        except Exception as error:
            raise InputError(
                f"batch {self.check_case.batch_size}: eager raises on fresh inputs: {_told(error)}\n"
                "  they have the shapes, dtypes and value ranges of the example; booleans, masks and ascending\n"
                "  whole numbers are the example's own: give an example that spans what the model takes"
            ) from error

    def _unlike_before(self, example: Example, seed: int) -> Example:
        """Where nothing could be drawn anew, a single whole number less by one, if eager takes it; else as it is."""
        if not self._examples or not has_same_inputs(example, self._examples[-1]):
            return example
        other = inputs.lowered(example)
        try:
            is_taken = not differences.nan_places(self.check_case.start.answer(self.check_case.eager, other, seed))
        # Whatever the user's model raises: it does not take that number, and the example's own is left.
        except Exception:
            return example
        return other if is_taken else example

    def _other_generators(self, eager: CallResult, replay: CallResult) -> TensorDifference | None:
        """Whether the next random number after a replay is another than after eager."""
        if pytree.has_same_tensors(eager.generators, replay.generators):
            return None
        if self.check_case.graph.receipt.opaque_regions:
            self.note("compiled code leaves the random generators elsewhere than eager: later numbers differ")
            return None
        drew = {True: "draws", False: "draws nothing"}
        return TensorDifference(
            where="the random generators",
            message="they stand elsewhere after a replay than after eager",
            evidence=(f"eager {drew[eager.random]}, replay {drew[replay.random]}",),
            finding_id="rng",
        )

    def _circumstances(self, difference: TensorDifference, eager: CallResult) -> TensorDifference:
        """What else is known to part replay from eager here."""
        evidence, finding_id = difference.evidence, difference.finding_id
        if eager.rebound and not difference.finding_id:
            rebound = ", ".join(sorted(eager.rebound))
            evidence = (*evidence, f"eager puts a new tensor there, where replay keeps the old one: {rebound}")
            finding_id = "rebinds-state"
        if eager.python:
            evidence = (*evidence, f"eager changes Python values, which replay never sees: {', '.join(eager.python)}")
            finding_id = finding_id or "stateful-python"
        if self.check_case.moved:
            moved = ", ".join(self.check_case.moved)
            evidence = (*evidence, f"at another address than at capture, where replay still reads: {moved}")
            finding_id = finding_id or "rebinds-state"
        if eager.random and self.check_case.graph.receipt.opaque_regions:
            evidence = (*evidence, _OTHER_RANDOM_NUMBERS)
        return replace(difference, evidence=evidence, finding_id=finding_id, assigned=eager.assigned)

    def _suspects(self, example: Example, seed: int) -> Iterator[Suspect]:
        """Other questions that the replay may have answered, the likelier ones first."""
        check_case = self.check_case
        previous = self._previous
        if previous is not None:
            yield Suspect(
                message="stale input: replay gives eager's answer to the previous inputs", answer=lambda: previous
            )
        yield Suspect(
            message="stale input: replay gives eager's answer to the inputs of capture",
            answer=lambda: check_case.start.answer(check_case.eager, check_case.example, seed),
        )

    def _observe(self, eager: CallResult, again: CallResult, noise: dict[str, float]) -> None:
        """Note what weakens or qualifies the proof."""
        self.is_repeatable &= differences.is_bit_exact(eager, again, self._before)
        for where in differences.nan_places(eager):
            self.note(f"eager itself gives NaN in {where}; NaN counts as equal to NaN")
        for name in eager.inputs:
            self.note(f"eager changes its argument {name} in place; replay changes the graph's copy of it")
        if eager.python:
            self.note("eager changes Python values of the model, which replay leaves as they are")
        if noise:
            where = max(noise, key=lambda place: noise[place])
            self.note(
                "eager is not repeatable: two runs from the same state, inputs and seed differ, most in "
                f"{where}; twice the difference was allowed"
            )

    def _look_back(self) -> None:
        first, last = self._eager[0], self._eager[-1]
        if has_same_inputs(self._examples[0], self._examples[-1]):
            self.note("the inputs hold nothing that could be drawn anew: a replay on stale inputs could not be seen")
        elif last.outputs and differences.has_same_outputs(first, last):
            self.note("outputs do not depend on the inputs: a replay on stale inputs could not be seen")

    def _disagree(self, difference: TensorDifference) -> Disagreement:
        return Disagreement(
            batch_size=self.check_case.batch_size,
            where=difference.where,
            message=difference.message,
            evidence=difference.evidence,
            finding_id=difference.finding_id,
            assigned=difference.assigned,
        )


def has_same_inputs(first: Example, second: Example) -> bool:
    """Whether two examples hold the same bits."""
    ones, others = (pytree.tensors_in((example.args, example.kwargs)) for example in (first, second))
    return all(same_bits(one, other) for one, other in zip(ones, others, strict=True))


def _dead(error: DeadTensorError) -> TensorDifference:
    message, *evidence = str(error).splitlines()
    told = tuple(line.strip() for line in evidence)
    return TensorDifference(where="graph", message=message, evidence=told, finding_id="rebinds-state")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

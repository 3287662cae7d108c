"""One batch size on its way through the check: its trials, and what they have shown so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_cudagraph import inputs, leaves
from pytest_cudagraph.check import answers
from pytest_cudagraph.check.compare import Difference, Tolerance, same_bits
from pytest_cudagraph.check.diagnosis import Suspect, explain
from pytest_cudagraph.check.start import Answer, Start
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import CapturedGraph, Model
from pytest_cudagraph.values import Agreement, Disagreement

_OTHER_RANDOM_NUMBERS = (
    "eager draws random numbers here, and compiled code draws others from the same seed "
    "(torch._inductor.config.fallback_random makes them equal)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """What is held against each other at one batch size, and the start that both sides share."""

    batch_size: int
    graph: CapturedGraph
    eager: Model
    example: Example
    start: Start
    tolerance: Tolerance
    moved: tuple[str, ...]
    """State that lies at another address than at capture."""


class Course:
    """The trials of one batch size. It ends with the first difference."""

    def __init__(self, entrant: Entrant) -> None:
        self.entrant = entrant
        self.disagreement: Disagreement | None = None
        self._eager: list[Answer] = []
        self._examples: list[Example] = []
        self._bit_exact = self._repeatable = True
        self._notes: dict[str, None] = {}  # a set that keeps its order
        self._before = entrant.start.tensors

    def trial(self, seed: int) -> None:
        """Run eager twice and replay once, on fresh inputs from the same start. Does nothing after a difference."""
        if self.disagreement is not None:
            return
        example = inputs.fresh(self.entrant.example, seed)
        eager, again = self._run_eager(example, seed), self._run_eager(example, seed)
        difference = answers.unrepeatable(eager, again, self._before, self.entrant.tolerance)
        if difference is None:
            noise = answers.noise_of(eager, again, self._before)
            self._observe(eager, again, noise)
            difference = self._replay(example, seed, eager, noise)
        self._eager.append(eager)
        self._examples.append(example)
        if difference is not None:
            self.disagreement = self._disagree(difference)

    def result(self) -> Agreement | Disagreement:
        """What the trials have shown."""
        if self.disagreement is not None:
            return self.disagreement
        self._look_back()
        last = self._eager[-1]
        return Agreement(
            batch_size=self.entrant.batch_size,
            replays=len(self._eager),
            leaves=answers.count_tensors(last),
            state_tensors=len(self.entrant.start.tensors),
            bit_exact=self._bit_exact,
            eager_repeatable=self._repeatable,
            not_compared=(*answers.opaque_places(last), *self.entrant.start.not_seen),
            notes=tuple(self._notes),
        )

    def _run_eager(self, example: Example, seed: int) -> Answer:
        try:
            return self.entrant.start.answer(self.entrant.eager, example, seed)
        # Whatever the user's model raises, the cause is inputs that it cannot take.
        except Exception as error:
            raise InputError(
                f"batch {self.entrant.batch_size}: eager raises on fresh inputs: {_told(error)}\n"
                "  they have the shapes, dtypes and value ranges of the example; booleans, masks and ascending\n"
                "  whole numbers are the example's own: give an example that spans what the model takes"
            ) from error

    def _replay(self, example: Example, seed: int, eager: Answer, noise: dict[str, float]) -> Difference | None:
        graph, start = self.entrant.graph, self.entrant.start
        launched = graph.replays
        # Poisoned before the state is brought back: an output may share its memory with state.
        start.poison(graph)
        replay = self._launch(example, seed)
        if graph.replays <= launched:
            return Difference(where="graph", message="the call returned without launching the graph")
        difference = answers.first_difference(eager, replay, self._before, self.entrant.tolerance, noise)
        if difference is None:
            self._bit_exact &= answers.is_bit_exact(eager, replay, self._before)
            return None
        told = explain(difference, eager, replay, lambda: start.poison(graph), self._suspects(example, seed))
        return self._circumstances(told, eager)

    def _circumstances(self, difference: Difference, eager: Answer) -> Difference:
        """What else is known to part replay from eager here."""
        evidence, finding_id = difference.evidence, difference.finding_id
        if eager.rebound and not difference.finding_id:
            rebound = ", ".join(sorted(eager.rebound))
            evidence = (*evidence, f"eager puts a new tensor there, where replay keeps the old one: {rebound}")
            finding_id = "rebinds-state"
        if eager.python:
            evidence = (*evidence, f"eager changes Python values, which replay never sees: {', '.join(eager.python)}")
            finding_id = finding_id or "stateful-python"
        if self.entrant.moved:
            moved = ", ".join(self.entrant.moved)
            evidence = (*evidence, f"at another address than at capture, where replay still reads: {moved}")
            finding_id = finding_id or "rebinds-state"
        if eager.random and self.entrant.graph.receipt.opaque_regions:
            evidence = (*evidence, _OTHER_RANDOM_NUMBERS)
        return replace(difference, evidence=evidence, finding_id=finding_id)

    def _launch(self, example: Example, seed: int) -> Answer:
        try:
            return self.entrant.start.answer(self.entrant.graph, example, seed)
        except (RuntimeError, CudagraphError) as error:
            raise CudagraphError(f"batch {self.entrant.batch_size}: replay raised {_told(error)}") from error

    def _suspects(self, example: Example, seed: int) -> Iterator[Suspect]:
        """Other questions that the replay may have answered, the likelier ones first."""
        entrant = self.entrant
        if self._eager:
            previous = self._eager[-1]
            yield Suspect(
                message="stale input: replay gives eager's answer to the previous inputs", answer=lambda: previous
            )
        yield Suspect(
            message="stale input: replay gives eager's answer to the inputs of capture",
            answer=lambda: entrant.start.answer(entrant.eager, entrant.example, seed),
        )

    def _observe(self, eager: Answer, again: Answer, noise: dict[str, float]) -> None:
        """Note what weakens or qualifies the proof."""
        self._repeatable &= answers.is_bit_exact(eager, again, self._before)
        for where in answers.nan_places(eager):
            self._note(f"eager itself gives NaN in {where}; NaN counts as equal to NaN")
        for name in eager.inputs:
            self._note(f"eager changes its argument {name} in place; replay changes the graph's copy of it")
        if eager.python:
            self._note("eager changes Python values of the model, which replay leaves as they are")
        if noise:
            where = max(noise, key=lambda place: noise[place])
            self._note(
                "eager is not repeatable: two runs from the same state, inputs and seed differ, most in "
                f"{where}; twice the difference was allowed"
            )

    def _look_back(self) -> None:
        first, last = self._eager[0], self._eager[-1]
        if _same_inputs(self._examples[0], self._examples[-1]):
            self._note("the inputs hold nothing that could be drawn anew: a replay on stale inputs could not be seen")
        elif last.outputs and answers.has_same_outputs(first, last):
            self._note("outputs do not depend on the inputs: a replay on stale inputs could not be seen")

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _disagree(self, difference: Difference) -> Disagreement:
        return Disagreement(
            batch_size=self.entrant.batch_size,
            where=difference.where,
            message=difference.message,
            evidence=difference.evidence,
            finding_id=difference.finding_id,
        )


def _same_inputs(first: Example, second: Example) -> bool:
    ones, others = (leaves.tensors_in((example.args, example.kwargs)) for example in (first, second))
    return all(same_bits(one, other) for one, other in zip(ones, others, strict=True))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

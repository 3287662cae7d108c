"""A guided generation: whether each token is allowed by its mask, whether each output is valid, what the mask costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pytest_cudagraph.decoding.results import GenerationReceipt, TokenAgreement, table_of, ties_text
from pytest_cudagraph.report import seconds, to_plain
from pytest_cudagraph.units import latency_text, percent_text
from pytest_cudagraph.values import Interval, Latency, Table

GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "python_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisallowedToken:
    """The first token, in time, that the mask of its own step does not allow."""

    row: int
    position: int
    """Counted from the first generated token, 0."""
    token: int
    shown: str
    """The token as text."""
    before: str
    """The text of its row before it."""
    in_previous_mask: bool
    """Whether the mask of the step before allows it. Then the mask came a step late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedOutput:
    """What one row generated."""

    text: str
    """Without the stop token. What is no UTF-8 is replaced."""
    is_cut: bool
    """Whether it reached the most tokens without a stop token. Then it is neither valid nor invalid."""
    problem: str = ""
    """What the independent parser says. Empty for a valid output, for a cut one, and where nothing parses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedTimes:
    """A guided decode step beside a greedy one from the same position. Both wait for each token."""

    greedy: Latency
    guided: Latency
    overhead: Interval
    """``guided step / greedy step - 1``."""
    mask_ns: float
    """The CPU time of one row's next mask: the token accepted, the mask filled. The median."""
    mask_share: float
    """``rows * mask_ns / guided step``."""

    def document(self) -> dict[str, Any]:
        """The times in seconds."""
        return {
            "greedy": to_plain(self.greedy, public=True),
            "guided": to_plain(self.guided, public=True),
            "overhead": asdict(self.overhead),
            "mask": seconds(self.mask_ns),
            "mask_share": self.mask_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """One batch of prompts, continued under a grammar."""

    batch_size: int
    prompt_length: int
    output_length: int
    """The most tokens of a row, with the stop token."""
    grammar: GrammarKind
    vocabulary: int
    """Of the logits, and so of the mask."""
    receipt: GenerationReceipt
    """Of the decode steps."""
    choices: GenerationReceipt
    """Of the choices of a token under the mask: one for the prompt, and one for each decode step."""
    outputs: tuple[GuidedOutput, ...]
    is_parsed: bool
    """Whether a parser other than the grammar's matcher judged the outputs. EBNF has none of its own."""
    tokens: TokenAgreement | None = None
    """None if a gate before failed."""
    times: GuidedTimes | None = None
    """None if a gate before failed."""

    kind: ClassVar[str] = "guided"
    has_entry: ClassVar[bool] = False

    def tables(self, test: str) -> tuple[Table, ...]:
        """One row: the outputs, and what the masks cost."""
        times = self.times
        costs: tuple[str, ...] = ("-",) * 3
        if times is not None:
            shares = map(percent_text, (times.mask_share, times.overhead.estimate))
            costs = (latency_text(times.mask_ns), *shares)
        both = (self.receipt, self.choices)
        replays = f"{sum(receipt.replays for receipt in both)}/{sum(receipt.steps for receipt in both)}"
        valid = f"{self.valid}/{self.completed}" if self.is_parsed else "-"
        outputs = (str(self.batch_size), self.grammar, valid, str(self.cut))
        row = (test, *outputs, *costs, replays, ties_text(self.tokens))
        return table_of("guided", "batch|grammar|valid|cut|mask/row|share|overhead|replays|ties", [row])

    def document(self) -> dict[str, Any]:
        """Its attributes and counts, with times in seconds."""
        counts = {name: getattr(self, name) for name in ("completed", "cut", "valid", "valid_ratio")}
        return asdict(self) | counts | {"times": self.times and self.times.document()}

    def properties(self) -> dict[str, str]:
        """None."""
        return {}

    @property
    def cut(self) -> int:
        """Outputs that reached the most tokens without a stop token."""
        return sum(output.is_cut for output in self.outputs)

    @property
    def completed(self) -> int:
        """The other outputs."""
        return len(self.outputs) - self.cut

    @property
    def valid(self) -> int:
        """Completed outputs in which the parser finds no problem."""
        return sum(not output.is_cut and not output.problem for output in self.outputs) if self.is_parsed else 0

    @property
    def valid_ratio(self) -> float | None:
        """``valid / completed``. None without a completed output, and where nothing parses."""
        return self.valid / self.completed if self.completed and self.is_parsed else None

"""The results of greedy generation, of a prefill in chunks and of prompt lookup. Each is a scenario of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from pytest_cudagraph.report import seconds, to_plain
from pytest_cudagraph.units import bytes_text, latency_text, to_seconds
from pytest_cudagraph.values import Column, Latency, Table


def table_of(title: str, columns: str, rows: Iterable[Sequence[str]]) -> tuple[Table, ...]:
    """A table with the name of the test in its first column. ``columns`` are the other titles, separated by bars."""
    titles = (Column(title="", right=False), *(Column(title=each) for each in columns.split("|")))
    return (Table(title=title, columns=titles, rows=tuple(map(tuple, rows))),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReceipt:
    """How the decode steps of one generation ran. A step makes one token of every row."""

    steps: int
    replays: int
    """Launches of graphs, counted by the graphs themselves."""
    piecewise: int = 0
    """Of the replays, those whose graphs hold only pieces of the step. The rest of it ran eagerly."""
    padded_rows: int = 0
    """Rows that every step computed beyond the batch, because the graph is larger."""
    eager: Mapping[str, int] = field(default_factory=dict)
    """Steps without a graph, by reason."""

    @property
    def text(self) -> str:
        """``31/31``: replays of steps. ``31/31, 5 piecewise``."""
        return f"{self.replays}/{self.steps}" + (f", {self.piecewise} piecewise" if self.piecewise else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAgreement:
    """The tokens of a generation are those of the eager reference."""

    compared: int
    """Tokens, over all rows."""
    same_shapes: bool
    """Whether both generations called the decoder with the same shapes. Then all tokens are equal."""
    ties: int = 0
    """Tokens that differ where eager's two largest logits are closer than twice the tolerance. 0 in the same shapes."""
    largest_difference: float | None = None
    """Of the logits, with the reference's tokens as input of each step. None in the same shapes."""
    tolerance: float | None = None
    """What was allowed at the place of the largest difference."""


def ties_text(tokens: TokenAgreement | None) -> str:
    """The ties, for a table."""
    return "-" if tokens is None else str(tokens.ties)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """The first token that differs from the eager reference."""

    row: int
    position: int
    """Counted from the first generated token, 0."""
    expected: int
    found: int
    differing: int
    """Tokens that differ, of ``compared``. Without teacher-forcing, one difference changes all later ones."""
    compared: int
    gap: float
    """Between eager's two largest logits at this place."""
    same_shapes: bool
    largest_difference: float | None = None
    """Of the logits, as in :class:`TokenAgreement`."""
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFiniteLogits:
    """The first logits of the eager reference from which no token can be chosen."""

    row: int
    position: int
    """Counted from the first generated token, 0."""
    largest: float
    """Of the logits of this token: ``nan``, ``inf``, or ``-inf`` where each one is."""

    @property
    def text(self) -> str:
        """``nan``, ``inf`` or ``only -inf``."""
        return "only -inf" if self.largest == float("-inf") else f"{self.largest:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTimes:
    """Times of whole generations by graphs, with a wait for the device after every token.

    The formulas are in :mod:`pytest_cudagraph.decoding.times`.
    """

    generations: int
    ttft: Latency
    """Time to first token: the prefill of the prompt."""
    itl: Latency
    """Inter-token latency: the gaps between tokens."""
    itl_p99_ns: float
    """Shown only. A few hundred gaps cannot decide about it."""
    tpot_ns: float
    """Time per output token, the median of the generations."""
    time_per_token: Latency
    """``duration / (rows * tokens)`` of each generation. The duration includes the prefill."""

    @property
    def tokens_per_second(self) -> float:
        """Of all rows: 1 / the median time per token."""
        return 1e9 / self.time_per_token.median_ns

    def figures(self) -> dict[str, Latency]:
        """What a baseline keeps."""
        return {"ttft": self.ttft, "itl": self.itl, "time_per_token": self.time_per_token}

    def document(self) -> dict[str, Any]:
        """The times in seconds."""
        return {
            "generations": self.generations,
            "ttft": to_plain(self.ttft, public=True),
            "itl": {**to_plain(self.itl, public=True), "p99": seconds(self.itl_p99_ns)},
            "tpot": seconds(self.tpot_ns),
            "tokens_per_second": self.tokens_per_second,
        }

    def properties(self) -> dict[str, str]:
        """Medians, for JUnit."""
        return {
            "tokens_per_second": f"{self.tokens_per_second:.4g}",
            "ttft_seconds": f"{to_seconds(self.ttft.median_ns):.4g}",
            "itl_seconds": f"{to_seconds(self.itl.median_ns):.4g}",
        }


Counted = Literal["activations", "activations+cache", "activations+cache+weights"]
"""The bytes that a ratio is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBytes:
    """The bytes of one prefill, counted operation by operation."""

    activations_bytes: int
    """The most that tensors made by the calls took at once."""
    cache_bytes: int
    """The decoder's own tensors that the calls wrote to."""
    weights_bytes: int
    """The decoder's own tensors that the calls only read."""

    def total(self, counting: Counted) -> int:
        """The sum of what is counted."""
        cache, weights = "cache" in counting, "weights" in counting
        return self.activations_bytes + cache * self.cache_bytes + weights * self.weights_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One batch of prompts of one length, continued."""

    batch_size: int
    prompt_length: int
    output_length: int
    receipt: GenerationReceipt
    tokens: TokenAgreement | None = None
    times: GenerationTimes | None = None
    bytes: PrefillBytes | None = None
    """Of the prefill of the prompts. None if a gate before failed."""
    prompt_lengths: tuple[int, ...] = ()
    """All that the test generates from. With several, a table shows time and memory over the length."""

    kind: ClassVar[str] = "generation"
    has_entry: ClassVar[bool] = True

    def tables(self, test: str) -> tuple[Table, ...]:
        """One row if it was timed. With several prompt lengths, another one with its memory."""
        times = self.times
        if times is None:
            return ()
        latencies = map(latency_text, (times.ttft.median_ns, times.itl.median_ns, times.itl_p99_ns))
        steps = (self.receipt.text, str(self.receipt.padded_rows), ties_text(self.tokens))
        row = (test, str(self.batch_size), *latencies, f"{times.tokens_per_second:.0f}", *steps)
        shown = table_of("generation", "batch|TTFT|ITL|ITL p99|tokens/s|replays|padded|ties", [row])
        return shown + self._over_lengths(test, times) if len(self.prompt_lengths) > 1 else shown

    def _over_lengths(self, test: str, times: GenerationTimes) -> tuple[Table, ...]:
        counted = (self.bytes.activations_bytes, self.bytes.cache_bytes, self.bytes.weights_bytes) if self.bytes else ()
        sizes = map(bytes_text, counted) if counted else ("-",) * 3
        row = (test, str(self.batch_size), str(self.prompt_length), latency_text(times.ttft.median_ns), *sizes)
        return table_of("prompt lengths", "batch|prompt|TTFT|activations|cache|weights", [row])

    def document(self) -> dict[str, Any]:
        """Its attributes, with times in seconds."""
        return {
            "prompt_length": self.prompt_length,
            "output_length": self.output_length,
            "receipt": asdict(self.receipt),
            "tokens": self.tokens and asdict(self.tokens),
            "times": self.times and self.times.document(),
            "bytes": self.bytes and asdict(self.bytes),
        }

    def properties(self) -> dict[str, str]:
        """The medians of a generation that was timed."""
        return self.times.properties() if self.times else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prompt of one row, prefilled in one call and in chunks."""

    prompt_length: int
    chunk: int
    counting: Counted
    whole: PrefillBytes
    chunked: PrefillBytes
    largest_difference: float | None
    """Of the last logits and the cache, between both. None on ``meta``, where there are no values."""
    tolerance: float | None
    not_finite: str = ""
    """What the logits of one call have instead of numbers: then nothing is compared. Empty if they are finite."""

    kind: ClassVar[str] = "prefill"
    has_entry: ClassVar[bool] = False

    def tables(self, test: str) -> tuple[Table, ...]:
        """One row: the bytes of both."""
        counted = (bytes_text(each.total(self.counting)) for each in (self.whole, self.chunked))
        row = (test, str(self.prompt_length), str(self.chunk), f"{self.bytes_ratio:.3f}", self.counting, *counted)
        return table_of("prefill", "prompt|chunk|ratio|counting|one call|chunks", [row])

    def document(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)

    def properties(self) -> dict[str, str]:
        """None."""
        return {}

    @property
    def bytes_ratio(self) -> float:
        """What is counted of the chunked prefill over that of the whole one."""
        return self.chunked.total(self.counting) / self.whole.total(self.counting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One batch of prompts, continued with prompt lookup. Terms as in vLLM's ``v1/spec_decode/metrics.py``."""

    batch_size: int
    prompt_length: int
    output_length: int
    k: int
    receipt: GenerationReceipt
    """Of the calls after the prefill: verifications, and decode steps where nothing was proposed."""
    tokens: TokenAgreement | None
    verified: int
    """Calls with a proposal."""
    drafted: int
    """Proposed tokens, over all rows."""
    accepted: int
    """Proposed tokens that were right in every row up to there, over all rows."""

    kind: ClassVar[str] = "lookup"
    has_entry: ClassVar[bool] = False

    def tables(self, test: str) -> tuple[Table, ...]:
        """One row: what the proposals gave."""
        figures = (f"{self.tokens_per_step:.2f}", f"{self.acceptance_ratio:.0%}", f"{self.mean_acceptance_length:.2f}")
        row = (test, str(self.batch_size), str(self.k), *figures, self.receipt.text, ties_text(self.tokens))
        return table_of("prompt lookup", "batch|k|tokens/step|acceptance|mean length|replays|ties", [row])

    def document(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)

    def properties(self) -> dict[str, str]:
        """None."""
        return {}

    @property
    def acceptance_ratio(self) -> float:
        """``accepted / drafted``. 0 without a proposal."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """``1 + accepted / (verified calls * rows)``: the bonus token of each verified call counts."""
        return 1.0 + (self.accepted / (self.verified * self.batch_size) if self.verified else 0.0)

    @property
    def tokens_per_step(self) -> float:
        """``(output length - 1) / calls``, of each row. All calls count, also those without a proposal."""
        return (self.output_length - 1) / self.receipt.steps

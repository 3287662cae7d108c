"""The calls of one name: their running totals, and the summary of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_cudagraph.serving.calls.histogram import DurationHistogram
from pytest_cudagraph.units import NS_PER_MS, NS_PER_S, latency_text, percent_text, plural, seconds_text

T = TypeVar("T")

_MOST_KEYS = 100
"""Of failures and reasons. A class may be made at run time, and memory must stay bounded."""
OTHERS = "(others)"
"""Counts what comes after the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSummary:
    """The calls of one name. Durations are of calls that succeeded, quantiles are right to 0.8 %."""

    name: str
    calls: int
    """Succeeded and failed."""
    failures: Mapping[str, int]
    """By the class of the exception."""
    tokens: int
    """Of calls that succeeded."""
    rows: int
    """The sum of the batch sizes, of calls that succeeded and have one."""
    mean_ns: float | None
    standard_deviation_ns: float | None
    """None with fewer than two calls."""
    minimum_ns: float | None
    p50_ns: float | None
    p90_ns: float | None
    p99_ns: float | None
    maximum_ns: float | None
    started_at_s: float
    """When the first call started, in seconds of the Unix epoch."""
    ended_at_s: float
    """When the last call ended."""
    calls_per_s: float | None
    """All calls, divided by the time from the first start to the last end. None if that time is 0."""
    tokens_per_s: float | None
    """All tokens, divided by the same time."""
    tokens_per_s_per_user: float | None
    """Tokens per row of the batch, divided by the durations of the calls with tokens. None without tokens."""
    served: Mapping[str, int]
    """Calls of models by path: ``graph``, ``compiled``, ``eager``. Empty if no runner was called."""
    reasons: Mapping[str, int]
    """Why no graph served a model's call."""
    synchronized: int
    """Calls at whose end the GPU had finished. The others end where the caller continues."""

    @property
    def failed(self) -> int:
        """The number of calls that failed."""
        return sum(self.failures.values())

    @property
    def graph_hit_ratio(self) -> float | None:
        """Model calls that a graph served, of all that a runner counted. None if no runner was called."""
        calls = sum(self.served.values())
        return self.served.get("graph", 0) / calls if calls else None

    def lines(self) -> list[str]:
        """The same in words."""
        failed = f", {self.failed} failed ({_counts_text(self.failures)})" if self.failures else ""
        span = seconds_text((self.ended_at_s - self.started_at_s) * NS_PER_S)
        return [
            f"{self.name}: {plural(self.calls, 'call')} in {span}{failed}",
            *([f"  {self._durations()}"] if self.p50_ns is not None else []),
            *([f"  {self._tokens()}"] if self.tokens else []),
            *([f"  {self._paths()}"] if self.served else []),
        ]

    def _durations(self) -> str:
        named = (("mean", self.mean_ns), ("p50", self.p50_ns), ("p90", self.p90_ns), ("p99", self.p99_ns),
                 ("longest", self.maximum_ns))  # fmt: skip
        texts = [f"{name} {latency_text(value)}" for name, value in named if value is not None]
        succeeded = self.calls - self.failed
        waits = "" if not self.synchronized else ", with the GPU" if self.synchronized >= succeeded else ", mixed"
        return ", ".join(texts) + waits

    def _tokens(self) -> str:
        rates = (("tokens/s", self.tokens_per_s), ("per user", self.tokens_per_s_per_user))
        shown = [f"{rate:.1f} {unit}" for unit, rate in rates if rate is not None]
        return ", ".join([plural(self.tokens, "token"), *shown])

    def _paths(self) -> str:
        reasons = f" ({_counts_text(self.reasons)})" if self.reasons else ""
        return f"graph {percent_text(self.graph_hit_ratio or 0.0)} of model calls: {_counts_text(self.served)}{reasons}"


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def misses(
    summary: CallSummary,
    *,
    max_p50_ms: float | None,
    min_tokens_per_s: float | None,
    min_graph_hit_ratio: float | None,
    max_failures: int,
    min_calls: int,
) -> list[str]:
    """The limits that the calls miss, one line each."""
    missed = []
    if summary.calls < min_calls:
        missed.append(f"{plural(summary.calls, 'call')}; this test asks for at least {min_calls}")
    if summary.failed > max_failures:
        missed.append(f"{plural(summary.failed, 'call')} failed; this test allows {max_failures}")
    p50_ns, rate, ratio = summary.p50_ns, summary.tokens_per_s, summary.graph_hit_ratio
    # A missing number is a miss, and NaN meets no limit.
    if max_p50_ms is not None and not (p50_ns is not None and p50_ns <= max_p50_ms * NS_PER_MS):
        shown = "no call succeeded" if p50_ns is None else f"p50 is {latency_text(p50_ns)}"
        missed.append(f"{shown}; this test allows at most {latency_text(max_p50_ms * NS_PER_MS)}")
    if min_tokens_per_s is not None and not (rate is not None and rate >= min_tokens_per_s):
        shown = "no tokens were recorded" if rate is None else f"{rate:.1f} tokens/s"
        missed.append(f"{shown}; this test asks for at least {min_tokens_per_s:.1f} tokens/s")
    if min_graph_hit_ratio is not None and not (ratio is not None and ratio >= min_graph_hit_ratio):
        model_calls = plural(sum(summary.served.values()), "model call")
        by_graph = f"graphs served {summary.served.get('graph', 0)} of {model_calls}"
        shown = "no runner was called" if ratio is None else by_graph
        missed.append(f"{shown}; this test asks for at least {percent_text(min_graph_hit_ratio)} by graphs")
    return [f"{summary.name}: {line}" for line in missed]


class CallTotals:
    """Running totals of one name, of bounded size. The owner holds a lock."""

    __slots__ = ("durations", "ended_ns", "failures", "rows", "served", "started_ns", "synchronized", "token_ns",
                 "tokens", "user_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.durations = DurationHistogram()
        self.failures: Counter[str] = Counter()
        self.served: Counter[tuple[str, str]] = Counter()
        self.tokens = self.rows = self.token_ns = self.synchronized = 0
        self.user_tokens = 0.0
        self.started_ns: int | None = None
        self.ended_ns = 0

    def add(self, record: tuple[Any, ...], epoch_ns: int) -> None:
        """Count one :class:`CallRecord`. ``epoch_ns`` is the Unix time at which the record's clock was 0."""
        _, started_ns, duration_ns, tokens, batch_size, failure, served, is_synchronized = record
        started_ns += epoch_ns
        if self.started_ns is None or started_ns < self.started_ns:
            self.started_ns = started_ns
        if started_ns + duration_ns > self.ended_ns:
            self.ended_ns = started_ns + duration_ns
        if served is not None:
            for key, count in served.items():
                _count(self.served, key, (key[0], OTHERS), count)
        if failure:
            _count(self.failures, failure, OTHERS, 1)
            return
        self.durations.add(duration_ns)
        self.synchronized += is_synchronized
        self.rows += batch_size or 0
        if tokens:
            self.tokens += tokens
            self.user_tokens += tokens / (batch_size or 1)
            self.token_ns += duration_ns

    def merge(self, other: CallTotals) -> None:
        """Add the calls of another process or monitor."""
        self.durations.merge(other.durations)
        for name, count in other.failures.items():
            _count(self.failures, name, OTHERS, count)
        for key, count in other.served.items():
            _count(self.served, key, (key[0], OTHERS), count)
        for name in ("tokens", "rows", "token_ns", "synchronized", "user_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        starts = [each for each in (self.started_ns, other.started_ns) if each is not None]
        self.started_ns = min(starts, default=None)
        self.ended_ns = max(self.ended_ns, other.ended_ns)

    def summary(self, name: str) -> CallSummary:
        """The totals now."""
        durations, failed = self.durations, self.failures.total()
        calls = durations.count + failed
        wall_s = (self.ended_ns - (self.started_ns or 0)) / NS_PER_S
        served: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for (path, reason), count in self.served.items():
            served[path] += count
            if reason:
                reasons[reason] += count
        return CallSummary(
            name=name,
            calls=calls,
            failures=dict(self.failures),
            tokens=self.tokens,
            rows=self.rows,
            mean_ns=durations.mean_ns,
            standard_deviation_ns=durations.standard_deviation_ns,
            minimum_ns=durations.minimum_ns,
            p50_ns=durations.quantile_ns(0.50),
            p90_ns=durations.quantile_ns(0.90),
            p99_ns=durations.quantile_ns(0.99),
            maximum_ns=durations.maximum_ns,
            started_at_s=(self.started_ns or 0) / NS_PER_S,
            ended_at_s=self.ended_ns / NS_PER_S,
            calls_per_s=_rate(calls, wall_s),
            tokens_per_s=_rate(self.tokens, wall_s) if self.tokens else None,
            tokens_per_s_per_user=_rate(self.user_tokens, self.token_ns / NS_PER_S) if self.tokens else None,
            served=dict(served),
            reasons=dict(reasons),
            synchronized=self.synchronized,
        )


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _count(counter: Counter[T], key: T, otherwise: T, count: int) -> None:
    counter[key if key in counter or len(counter) < _MOST_KEYS else otherwise] += count

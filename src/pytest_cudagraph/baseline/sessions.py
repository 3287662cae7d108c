"""How far a replay is from what earlier sessions saved of it, and how far an unchanged one could be.

Latencies of unchanged code differ from session to session by more than they do within one; more calls do not help. So
a baseline keeps the last sessions, and a new one is held against their prediction bound (docs/baselines.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_cudagraph.values import Comparison, DeviceInfo, Latency, SavedBatch, Session, Timing

KEPT = 10
"""Sessions per entry. The bound hardly narrows beyond: at 10 it is 7 % wider than with any number of them."""

ENOUGH = 5
"""Sessions from which on their own spread counts; fewer cannot tell it."""

PRIOR_SPREAD = 0.03
"""The standard deviation between sessions that is assumed before there are enough, as a log-ratio.

Measured on one virtual machine: 1.3 % between 100 quiet sessions, more beside noisy neighbours; CodSpeed published
2.66 % across hosted runners. See docs/statistics.md.
"""

LEAST_SPREAD = 0.004
"""The smallest spread believed: what 100 sessions had when divided by a reference. Below it they were hardly apart."""

_NORMAL_QUANTILE = 1.645
_T_QUANTILES = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""At 0.95, one-sided: of the normal distribution, and of Student's t by degrees of freedom.

One less than the sessions (scipy.stats.norm.ppf(0.95), scipy.stats.t.ppf(0.95, df)).
"""

_UNFOLLOWED = 0.3
"""Of what the reference moved by, the share that a replay need not have followed: the margin grows by it.

Beside heavy neighbours, where all moved by 14 to 28 % (one standard deviation), replays of three models followed by
0.67 to 0.83 of the reference's move. On a machine at rest this adds nothing.
"""

_REST_LOG = 0.1
"""How far apart, as a log-ratio, the quartiles lie within a run before the machine is called restless.

3 % on a quiet one; 30 % and more where other processes want the same cores. What is beyond is a session's unrest.
"""

_UNREST_SHARE = 0.4
"""Of the unrest of both sides, as errors that are independent, what the margin grows by.

Quartiles tell how far single calls lay apart; a median of many, divided by another of the same moments, lies nearer.
Measured where other processes wanted the same two cores: docs/baselines.md.
"""

_ALIKE_LOG = 0.005
"""Two statistics this near to each other say the same, and the median, which every table shows, says it."""

_ARM_MOVED_LOG = 2 * PRIOR_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One replay beside the sessions of an entry: how far it is off, and how far an unchanged one could be."""

    what: str
    """``median``, or ``lower quartile`` where that moved less."""
    before_ns: float
    """Geometric mean of the sessions."""
    after_ns: float
    log_ratio: float
    """After over before; divided by the reference workload's own ratio where ``reference_ns`` is given.

    On a restless machine whichever is nearer to no change, divided or not: a slowdown shows in both.
    """
    margin_log: float
    """Half of the 90 % prediction interval: each bound holds for 95 % of unchanged sessions."""
    spread: float
    """Standard deviation between sessions that the margin is made of."""
    sessions: int
    unrest_log: float = 0.0
    """The part of the margin that is for other work on the machine, now and when the sessions were saved."""
    apart_log: float = 0.0
    """How much further up ``log_ratio`` lies in the reading that was not taken: it is not ruled out."""
    reference_ns: tuple[float, float] | None = None
    """The reference workload, before (geometric mean) and after; None where latencies were compared as they are."""

    @property
    def is_prior(self) -> bool:
        """Whether the spread is assumed, for want of sessions."""
        return self.sessions < ENOUGH

    @property
    def high_log(self) -> float:
        """The upper end of the interval; the lower one is ``log_ratio - margin_log``."""
        return self.log_ratio + self.apart_log + self.margin_log

    def comparison(self, max_slowdown: float) -> Comparison:
        """``slower`` or ``same`` when all of the interval is beyond ``max_slowdown`` or within it, else ``uncertain``.

        Under the assumed spread also half of what is allowed is the ``same``: the interval alone would keep a gate
        tighter than it undecided at equal speed. ``faster`` when the gain is beyond the tolerance and all of the
        interval is a gain.
        """
        allowed_log = math.log1p(max_slowdown)
        if self.log_ratio - self.margin_log > allowed_log:
            return "slower"
        is_small = self.is_prior and self.log_ratio + self.apart_log <= allowed_log / 2
        if self.high_log > allowed_log and not is_small:
            return "uncertain"
        return "faster" if -self.log_ratio > max(allowed_log, self.margin_log) else "same"


def session_of(timing: Timing, device: DeviceInfo, *, date: str = "", commit: str = "") -> Session:
    """What a baseline keeps of a measurement."""
    reference = timing.reference
    return Session(
        date=date,
        commit=commit,
        software=device.software,
        q25_ns=timing.replay.q25_ns,
        median_ns=timing.replay.median_ns,
        reference_q25_ns=reference.q25_ns if reference else None,
        reference_median_ns=reference.median_ns if reference else None,
        unrest_log=max(map(_beyond_rest_log, (reference, timing.replay))) if reference else 0.0,
    )


def _beyond_rest_log(latency: Latency) -> float:
    # Of the replay too: where a machine is shared for a fifth of a run, one of the two may show nothing between its
    # quartiles, and yet the quartiles are of different machines.
    return max(math.log(latency.q75_ns / latency.q25_ns) - _REST_LOG, 0.0)


def change(saved: SavedBatch, now: Session) -> Change:
    """Hold a session against those of ``saved``, each divided by its reference workload where that tells.

    Under other software the reference has changed as well, and would hide what the change costs: then, and where none
    was read, latencies are compared as they are; else with those sessions that can be divided. Where other work on
    the machine disturbed the reference, a slowdown must show without it too, and an equal speed with it. Prediction
    interval for one more observation of a normal population: Hahn and Meeker, Statistical Intervals (1991), section
    4.8: mean +- t s sqrt(1 + 1/k).
    """
    sessions = history(saved)[-KEPT:]
    found = _steadier(*(_change(each, sessions, now) for each in _STATISTICS))
    if not found.unrest_log or found.reference_ns is None:
        return found
    as_it_is = _steadier(*(_change(each, sessions, _undivided(now)) for each in _STATISTICS))
    least = _steadier(found, replace(as_it_is, margin_log=found.margin_log, unrest_log=found.unrest_log))
    return replace(least, apart_log=max(found.log_ratio - least.log_ratio, 0.0))


def _steadier(one: Change, other: Change) -> Change:
    """The one that moved less: a neighbour's bursts move one, a lucky stretch the other; what is real moves both."""
    return other if abs(other.log_ratio) < abs(one.log_ratio) - _ALIKE_LOG else one


_STATISTICS = (
    ("median", "median_ns", "reference_median_ns"),
    ("lower quartile", "q25_ns", "reference_q25_ns"),
)
"""In words, and where a session holds it: of the replay, of the reference."""


def _change(statistic: tuple[str, str, str], sessions: Sequence[Session], now: Session) -> Change:
    what, of_replay, of_reference = statistic
    divisible = [each for each in sessions if getattr(each, of_reference) and each.software == now.software]
    is_divided = bool(divisible) and getattr(now, of_reference) is not None
    sessions = divisible if is_divided else sessions
    befores_ns, after_ns = [getattr(each, of_replay) for each in sessions], getattr(now, of_replay)
    references_ns = [getattr(each, of_reference) if is_divided else 1.0 for each in (*sessions, now)]
    *before_logs, after_log = (
        math.log(value / divisor) for value, divisor in zip((*befores_ns, after_ns), references_ns, strict=True)
    )
    count = len(before_logs)
    spread, quantile = PRIOR_SPREAD, _NORMAL_QUANTILE
    if count >= ENOUGH:
        spread, quantile = max(LEAST_SPREAD, statistics.stdev(before_logs)), _T_QUANTILES[count - 1]
    unrest_log = _UNREST_SHARE * math.hypot(now.unrest_log, *(each.unrest_log / count for each in sessions))
    margin_log = quantile * spread * math.sqrt(1 + 1 / count) + unrest_log
    pair = (_geometric_mean(references_ns[:-1]), references_ns[-1]) if is_divided else None
    if pair is not None:
        margin_log += _UNFOLLOWED * abs(math.log(pair[1] / pair[0]))
    return Change(
        what=what,
        before_ns=_geometric_mean(befores_ns),
        after_ns=after_ns,
        log_ratio=after_log - statistics.fmean(before_logs),
        margin_log=margin_log,
        spread=spread,
        sessions=count,
        unrest_log=unrest_log,
        reference_ns=pair,
    )


def _undivided(session: Session) -> Session:
    return replace(session, reference_q25_ns=None, reference_median_ns=None)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def history(saved: SavedBatch) -> tuple[Session, ...]:
    """The sessions of an entry; what an older file holds is one."""
    if saved.sessions:
        return saved.sessions
    return (
        Session(
            date=saved.saved_at[:10],
            commit="",
            software=saved.device.software,
            q25_ns=saved.replay.q25_ns,
            median_ns=saved.replay.median_ns,
        ),
    )


def is_continued(saved: SavedBatch, new: SavedBatch) -> bool:
    """Whether ``new`` found what is saved: the same kernels and software on the same hardware, as fast as before.

    As fast: within the margin for unchanged sessions of a machine at rest. Whatever else was accepted begins a history
    of its own.
    """
    if (saved.kernels, dict(saved.kernel_names)) != (new.kernels, dict(new.kernel_names)):
        return False
    if saved.device.hardware_changes(new.device) or saved.device.software != new.device.software:
        return False
    if (saved.compiled is None) != (new.compiled is None):
        return False
    found = change(saved, history(new)[-1])
    return abs(found.log_ratio) + found.apart_log <= found.margin_log - found.unrest_log


def continued(saved: SavedBatch, new: SavedBatch) -> SavedBatch:
    """The entry to keep: ``new`` alone, or, where it found what is saved, that with one session more.

    Its latencies then stay as they are unless eager or compiled moved: a diff shows a line, and not a new set of noise.
    """
    if not is_continued(saved, new):
        return new
    sessions = (*history(saved), *history(new))[-KEPT:]
    return replace(new if arms_moved(saved, new) else saved, sessions=sessions)


def arms_moved(saved: SavedBatch, new: SavedBatch) -> bool:
    """Whether eager or compiled differ by more than two sessions of the same code do."""
    pairs = [(saved.eager, new.eager)]
    if saved.compiled and new.compiled:
        pairs.append((saved.compiled, new.compiled))
    return any(abs(math.log(after.median_ns / before.median_ns)) > _ARM_MOVED_LOG for before, after in pairs)

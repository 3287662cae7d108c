"""How far a replay is from what earlier sessions saved of it, and how far an unchanged one could be.

Latencies of unchanged code differ more between sessions than within one, and more calls do not help. So a baseline
keeps the last sessions, and a new session is compared with their prediction bound (docs/statistics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pytest_cudagraph.values import (
    DeviceInfo,
    Latency,
    LatencyChange,
    NoBaseline,
    SavedBatch,
    SavedFigure,
    Session,
    Timing,
)

KEPT = 10
"""Sessions per entry. With 10 the bound is 7 % wider than with infinitely many."""

ENOUGH = 5
"""The number of sessions from which their own spread is used."""

PRIOR_SPREAD = 0.03
"""The standard deviation between sessions that is assumed before there are enough, as a log-ratio.

Measured on one virtual machine: 1.3 % between 100 quiet sessions, more beside noisy neighbours; CodSpeed published
2.66 % across hosted runners. See docs/statistics.md.
"""

LEAST_SPREAD = 0.004
"""The smallest spread used: that of 100 sessions divided by a reference.

Without it one unchanged update in ten begins the history anew on a very quiet machine, with it none.
"""

_NORMAL_QUANTILE = 1.645
_T_QUANTILES = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""At 0.95, one-sided: of the normal distribution, and of Student's t by degrees of freedom.

One less than the sessions (scipy.stats.norm.ppf(0.95), scipy.stats.t.ppf(0.95, df)).
"""

_UNFOLLOWED = 0.3
"""The margin grows by this share of the reference's change, because a replay need not follow all of it.

Measured beside heavy neighbours: replays of three models followed 0.67 to 0.83 of the reference's change. Without it
0.8 % of unchanged replays failed on a busy machine, with it 0.5 % (docs/statistics.md).
"""

_REST_LOG = 0.1
"""The log-ratio of the quartiles of a run on an idle machine. The excess is called unrest.

Measured: 3 % on a quiet machine, 30 % and more where other processes want the same cores.
"""

_UNREST_SHARE = 0.4
"""The margin grows by this share of the unrest of both sides, taken as independent errors.

A median of many calls lies nearer than their quartiles. Without it 5.6 % of unchanged replays failed on a busy
machine, with it 1.0 % (docs/statistics.md).
"""

_ALIKE_LOG = 0.005
"""Two statistics this close count as equal. Then the message names the median, as every table does."""

_ARM_MOVED_LOG = 2 * PRIOR_SPREAD

NO_FIGURES: Mapping[str, Latency] = MappingProxyType({})


def session_of(
    timing: Timing,
    device: DeviceInfo,
    *,
    date: str = "",
    commit: str = "",
    figures: Mapping[str, Latency] = NO_FIGURES,
) -> Session:
    """What a baseline keeps of a measurement, and of the figures of generations."""
    session = session_of_arm(timing.replay, timing.reference, device.software, date=date, commit=commit)
    saved = {
        name: SavedFigure(q25_ns=each.q25_ns, median_ns=each.median_ns, unrest_log=_beyond_rest_log(each))
        for name, each in figures.items()
    }
    return replace(session, figures=saved)


def session_of_arm(
    arm: Latency, reference: Latency | None, software: str, *, date: str = "", commit: str = ""
) -> Session:
    """The same of one arm, with the reference workload that was timed beside it."""
    return Session(
        date=date,
        commit=commit,
        software=software,
        q25_ns=arm.q25_ns,
        median_ns=arm.median_ns,
        reference_q25_ns=reference.q25_ns if reference else None,
        reference_median_ns=reference.median_ns if reference else None,
        unrest_log=max(map(_beyond_rest_log, (reference, arm))) if reference else 0.0,
    )


def _beyond_rest_log(latency: Latency) -> float:
    # The replay counts too: if a machine is shared for a fifth of a run, one of the two may show no unrest.
    return max(math.log(latency.q75_ns / latency.q25_ns) - _REST_LOG, 0.0)


def latency_change(saved: SavedBatch | NoBaseline, timing: Timing, device: DeviceInfo) -> LatencyChange | None:
    """Compare a measurement with the saved entry. None without an entry of the same hardware."""
    if isinstance(saved, NoBaseline) or saved.device.hardware_changes(device):
        return None
    return change(saved, session_of(timing, device))


def change(saved: SavedBatch, now: Session) -> LatencyChange:
    """Compare a session with those of ``saved``. See :func:`change_of_sessions`."""
    return change_of_sessions(saved.sessions, now)


def change_of_sessions(sessions: Sequence[Session], now: Session) -> LatencyChange:
    """Compare a session with earlier ones, each divided by its reference workload if possible.

    Latencies are not divided without a reference, or if the software differs: then the reference changed as well, and
    would hide the cost of the change. A disturbed reference can prevent a failure, never cause one.
    """
    sessions = sessions[-KEPT:]
    divisible = [each for each in sessions if each.reference_median_ns and each.software == now.software]
    if not divisible or now.reference_median_ns is None:
        return _least_change(sessions, now, divided=False)
    relative = _least_change(divisible, now, divided=True)
    if not relative.unrest_log:
        return relative
    # Without this second reading 3.9 % of unchanged replays failed on a busy machine, with it 1.0 %.
    as_it_is = _least_change(divisible, now, divided=False)
    least = _nearer(relative, replace(as_it_is, margin_log=relative.margin_log, spread=relative.spread))
    return replace(least, apart_log=max(relative.log_ratio - least.log_ratio, 0.0))


def figure_changes(saved: SavedBatch, now: Session) -> dict[str, LatencyChange]:
    """Compare each figure of a session with those of ``saved`` that have it, as :func:`change` compares the replay."""
    changes = {}
    for name in now.figures:
        sessions = tuple(_as_replay(each, name) for each in saved.sessions if name in each.figures)
        if sessions:
            changes[name] = change(replace(saved, sessions=sessions), _as_replay(now, name))
    return changes


def _as_replay(session: Session, name: str) -> Session:
    figure = session.figures[name]
    unrest_log = max(session.unrest_log, figure.unrest_log)
    return replace(session, q25_ns=figure.q25_ns, median_ns=figure.median_ns, unrest_log=unrest_log)


def _least_change(sessions: Sequence[Session], now: Session, *, divided: bool) -> LatencyChange:
    """Median or lower quartile: a neighbour's burst moves one of them, a real change moves both.

    By the median alone 3.4 % of unchanged replays failed on a busy machine, by both 1.0 %.
    """
    medians = [(each.median_ns, each.reference_median_ns) for each in (*sessions, now)]
    quartiles = [(each.q25_ns, each.reference_q25_ns) for each in (*sessions, now)]
    unrest_log = _UNREST_SHARE * math.hypot(now.unrest_log, *[each.unrest_log / len(sessions) for each in sessions])
    return _nearer(
        _change("median", medians, unrest_log, divided=divided),
        _change("lower quartile", quartiles, unrest_log, divided=divided),
    )


def _nearer(one: LatencyChange, other: LatencyChange) -> LatencyChange:
    return other if abs(other.log_ratio) < abs(one.log_ratio) - _ALIKE_LOG else one


def _change(
    what: str, levels_ns: Sequence[tuple[float, float | None]], unrest_log: float, *, divided: bool
) -> LatencyChange:
    """Prediction interval for one more observation of a normal population: mean +- t s sqrt(1 + 1/k).

    ``levels_ns`` are replay and reference of each session, the new one last. Hahn and Meeker, Statistical Intervals
    (1991), section 4.8.
    """
    *replay_logs, replay_log = [math.log(replay_ns) for replay_ns, _ in levels_ns]
    *divisor_logs, divisor_log = [math.log(ns) if divided and ns else 0.0 for _, ns in levels_ns]
    count = len(replay_logs)
    before_log, before_divisor_log = sum(replay_logs) / count, sum(divisor_logs) / count
    spread, quantile = _spread([replay - divisor for replay, divisor in zip(replay_logs, divisor_logs, strict=True)])
    unfollowed_log = _UNFOLLOWED * abs(divisor_log - before_divisor_log)
    return LatencyChange(
        what=what,
        before_ns=math.exp(before_log),
        after_ns=levels_ns[-1][0],
        log_ratio=(replay_log - divisor_log) - (before_log - before_divisor_log),
        margin_log=quantile * spread * math.sqrt(1 + 1 / count) + unrest_log + unfollowed_log,
        spread=spread,
        sessions=count,
        is_prior=count < ENOUGH,
        unrest_log=unrest_log,
        reference_ns=(math.exp(before_divisor_log), math.exp(divisor_log)) if divided else None,
    )


def _spread(logs: Sequence[float]) -> tuple[float, float]:
    """Standard deviation between sessions, and the quantile that goes with it."""
    if len(logs) < ENOUGH:
        return PRIOR_SPREAD, _NORMAL_QUANTILE
    # Not statistics.stdev, whose exact fractions take a second for 10,000 entries.
    mean, freedom = sum(logs) / len(logs), len(logs) - 1
    return max(LEAST_SPREAD, math.sqrt(sum((each - mean) ** 2 for each in logs) / freedom)), _T_QUANTILES[freedom]


def is_continued(saved: SavedBatch, new: SavedBatch) -> bool:
    """Whether ``new`` has the kernels, software, hardware and speed of ``saved``.

    The speed is the same within the margin for unchanged sessions of an idle machine. Every other accepted entry
    starts a new history.
    """
    if (saved.kernels, dict(saved.kernel_names)) != (new.kernels, dict(new.kernel_names)):
        return False
    if saved.device.hardware_changes(new.device) or saved.device.software != new.device.software:
        return False
    if (saved.compiled is None) != (new.compiled is None):
        return False
    return _is_within(change(saved, new.sessions[-1]))


def _is_within(moved: LatencyChange) -> bool:
    return abs(moved.log_ratio) + moved.apart_log <= moved.margin_log - moved.unrest_log


def moved_figures(saved: SavedBatch, new: SavedBatch) -> dict[str, LatencyChange]:
    """The figures of generations that are not those of unchanged code. Their history begins anew."""
    changes = figure_changes(saved, new.sessions[-1])
    return {name: each for name, each in changes.items() if not _is_within(each)}


def continued(saved: SavedBatch, new: SavedBatch) -> SavedBatch:
    """The entry to write: ``new``, or ``saved`` with one more session if the speed is unchanged.

    The saved latencies stay unless eager or compiled changed, so that a diff shows one line and no noise.
    """
    if not is_continued(saved, new):
        return new
    sessions = (*_without_moved(saved, new), *new.sessions)[-KEPT:]
    return replace(new if arms_moved(saved, new) else saved, sessions=sessions)


def _without_moved(saved: SavedBatch, new: SavedBatch) -> list[Session]:
    """The sessions of ``saved`` without the figures that begin anew."""
    moved = moved_figures(saved, new)
    if not moved:
        return list(saved.sessions)
    return [
        replace(each, figures={name: figure for name, figure in each.figures.items() if name not in moved})
        for each in saved.sessions
    ]


def age(entry: SavedBatch) -> tuple[str, str]:
    """Sorts the newest entry last: by the day of its latest session, then by when it was saved."""
    return entry.sessions[-1].date, entry.saved_at


def joined(older: SavedBatch, newer: SavedBatch) -> SavedBatch:
    """One entry of two files: the newer, which continues the older, with the sessions of both."""
    # A session that both files hold is one session.
    sessions = dict.fromkeys((*_without_moved(older, newer), *newer.sessions))
    return replace(newer, sessions=tuple(sorted(sessions, key=lambda each: each.date)[-KEPT:]))


def arms_moved(saved: SavedBatch, new: SavedBatch) -> bool:
    """Whether eager or compiled changed by more than two sessions of the same code differ."""
    pairs = [(saved.eager, new.eager)]
    if saved.compiled and new.compiled:
        pairs.append((saved.compiled, new.compiled))
    return any(abs(math.log(after.median_ns / before.median_ns)) > _ARM_MOVED_LOG for before, after in pairs)

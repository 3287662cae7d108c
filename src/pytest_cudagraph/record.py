"""What of a run may be kept, and how it stands beside what was kept before. Pure: reads and writes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pytest_cudagraph.baseline import Key
from pytest_cudagraph.values import BatchReport, Comparison, GraphReport, Judgement, Latency, SavedBatch, Verdict

Update: TypeAlias = Literal["new", "changed", "all"]
"""What ``--cudagraph-update`` may replace."""

MOVED_RATIO = 1.03
"""A median that moved less than this is left as it is under ``changed``: rewriting noise only makes diffs long."""

_SESSION_NOISE_LOG = 0.06
"""Two standard deviations of what one machine's sessions differ by, as a log-ratio: the latency gate's own margin."""

COUNTED = (
    "passed", "failed", "slower", "faster", "inconclusive", "wrong", "not captured", "not judged", "new", "stale",
)  # fmt: skip
"""The words of the summary's last line, in its order. ``faster``, ``new`` and ``stale`` are remarks, not verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be written, what stays as it was although it could be written, and what may not be written, why."""

    write: tuple[SavedBatch, ...] = ()
    kept: tuple[Key, ...] = ()
    refused: tuple[tuple[str, int, str], ...] = ()
    """Name, batch size, reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry of two baselines side by side; ``None`` on the side that lacks it."""

    name: str
    batch_size: int
    old: SavedBatch | None
    new: SavedBatch | None
    comparison: Comparison | Literal["gone"]

    @property
    def added_kernels(self) -> int | None:
        """How many kernels more the new one has; None unless both were counted."""
        if self.old is None or self.new is None or self.old.kernels is None or self.new.kernels is None:
            return None
        return self.new.kernels - self.old.kernels


def entries(reports: Iterable[GraphReport], update: Update, saved: Mapping[Key, SavedBatch], *, saved_at: str) -> Plan:
    """Decide what of these reports goes into the baseline; ``saved_at`` is an ISO date.

    Only what passed every gate may: a comparison that was not judged, for there was nothing saved or because it is
    being replaced on request, does not stand in the way. Hand in only reports of tests that passed as a whole.
    """
    write: list[SavedBatch] = []
    kept: list[Key] = []
    refused: list[tuple[str, int, str]] = []
    for key, found in sorted(_by_key(reports).items()):
        reason = _ambiguity(found) or _refusal(*found[-1])
        if reason:
            refused.append((*key, reason))
            continue
        entry = _entry(*found[-1], saved_at)
        if _is_wanted(entry, saved.get(key), update):
            write.append(entry)
        else:
            kept.append(key)
    return Plan(write=tuple(write), kept=tuple(kept), refused=tuple(refused))


def counts(reports: Sequence[GraphReport], saved: Mapping[Key, SavedBatch], *, complete_run: bool) -> dict[str, int]:
    """How many batch sizes there are of each word of :data:`COUNTED`; a model without any counts once."""
    found: Counter[str] = Counter()
    for report in reports:
        found.update(batch.word for batch in report.batches)
        found.update(batch.comparison for batch in report.batches if batch.comparison == "new")
        found.update(batch.comparison for batch in report.batches if _is_faster(batch))
        if not report.batches:
            found[report.verdict.value.replace("-", " ")] += 1
    found["stale"] = len(stale(reports, saved, complete_run=complete_run))
    return {word: found[word] for word in COUNTED}


def stale(reports: Iterable[GraphReport], saved: Mapping[Key, SavedBatch], *, complete_run: bool) -> tuple[Key, ...]:
    """Saved entries that a complete run did not cover; a run of selected tests can tell nothing."""
    if not complete_run:
        return ()
    covered, names = set(), set()
    for report in reports:
        covered |= {(report.name, batch.batch_size) for batch in report.batches}
        if report.verdict.fails or not report.batches:
            # A story that ended early says nothing of the batch sizes it never came to.
            names.add(report.name)
    return tuple(sorted(key for key in saved if key not in covered and key[0] not in names))


def compare(old: Mapping[Key, SavedBatch], new: Mapping[Key, SavedBatch], *, max_slowdown: float) -> tuple[Change, ...]:
    """Two baselines, entry by entry, ordered by name and batch size; ``max_slowdown`` is a fraction."""
    return tuple(
        Change(
            name=key[0],
            batch_size=key[1],
            old=old.get(key),
            new=new.get(key),
            comparison=_comparison(old.get(key), new.get(key), max_slowdown),
        )
        for key in sorted({*old, *new})
    )


def _comparison(old: SavedBatch | None, new: SavedBatch | None, max_slowdown: float) -> Comparison | Literal["gone"]:
    if new is None:
        return "gone"
    if old is None:
        return "new"
    if old.device.hardware != new.device.hardware:
        return "not-comparable"
    moved_log, allowed_log = _smaller_move_log(old.replay, new.replay), math.log1p(max_slowdown)
    if moved_log > allowed_log + _SESSION_NOISE_LOG:
        return "slower"
    if moved_log > allowed_log:
        return "uncertain"
    return "faster" if -moved_log > max(allowed_log, math.log1p(_SESSION_NOISE_LOG)) else "same"


def _smaller_move_log(old: Latency, new: Latency) -> float:
    # Median and lower quartile must both have moved, as in the latency gate.
    moves = (math.log(new.median_ns / old.median_ns), math.log(new.q25_ns / old.q25_ns))
    return min(moves, key=abs)


def _by_key(reports: Iterable[GraphReport]) -> dict[Key, list[tuple[GraphReport, BatchReport]]]:
    found: dict[Key, list[tuple[GraphReport, BatchReport]]] = {}
    for report in reports:
        for batch in report.batches:
            found.setdefault((report.name, batch.batch_size), []).append((report, batch))
    return found


def _ambiguity(found: Sequence[tuple[GraphReport, BatchReport]]) -> str:
    # The same test twice is a rerun, and the last one counts; two tests of one name would overwrite each other.
    nodeids = sorted({report.nodeid for report, _ in found})
    return f"{' and '.join(nodeids)} use the same name: give each its own" if len(nodeids) > 1 else ""


def _refusal(report: GraphReport, batch: BatchReport) -> str:
    judgements = [*report.judgements, *batch.judgements]
    blocking = next((judgement for judgement in judgements if _blocks(judgement)), None)
    if blocking is not None:
        return f"{blocking.verdict.value.replace('-', ' ')}: {blocking.reason}"
    if not batch.judgements:
        return "nothing was judged"
    facts = {"replay was not checked": batch.agreement, "it was not timed": batch.timing, "no device": report.device}
    return next((reason for reason, fact in facts.items() if fact is None), "")


def _blocks(judgement: Judgement) -> bool:
    if judgement.gate in ("baseline", "structure") and judgement.verdict is Verdict.NOT_JUDGED:
        return False
    return judgement.verdict is not Verdict.PASSED


def _entry(report: GraphReport, batch: BatchReport, saved_at: str) -> SavedBatch:
    timing, receipt = batch.timing, batch.receipt
    assert timing is not None
    assert report.device is not None
    return SavedBatch(
        name=report.name,
        batch_size=batch.batch_size,
        eager=timing.eager,
        replay=timing.replay,
        compiled=timing.compiled,
        speedup=timing.speedup,
        kernels=receipt.kernels if receipt else None,
        kernel_names=receipt.kernel_names if receipt else {},
        device=report.device,
        saved_at=saved_at,
    )


def _is_wanted(entry: SavedBatch, saved: SavedBatch | None, update: Update) -> bool:
    if saved is None or update == "all":
        return True
    return update == "changed" and _has_changed(entry, saved)


def _has_changed(entry: SavedBatch, saved: SavedBatch) -> bool:
    if entry.kernels != saved.kernels or dict(entry.kernel_names) != dict(saved.kernel_names):
        return True
    if (entry.compiled is None) != (saved.compiled is None):
        return True
    pairs = ((entry.eager, saved.eager), (entry.replay, saved.replay))
    return any(abs(math.log(new.median_ns / old.median_ns)) > math.log(MOVED_RATIO) for new, old in pairs)


def _is_faster(batch: BatchReport) -> bool:
    return batch.comparison == "faster" and batch.verdict is Verdict.PASSED

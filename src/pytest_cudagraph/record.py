"""Which results of a run go into the baseline, and how two baselines differ. Pure: reads and writes no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pytest_cudagraph import baseline
from pytest_cudagraph.baseline import Key
from pytest_cudagraph.values import BatchReport, Comparison, GraphReport, Judgement, SavedBatch, Verdict

Update: TypeAlias = Literal["new", "changed", "all"]
"""What ``--cudagraph-update`` may replace."""

COUNTED = (
    "passed", "failed", "slower", "faster", "inconclusive", "wrong", "not captured", "not judged", "not comparable",
    "new", "changed", "no baseline yet", "stale",
)  # fmt: skip
"""The words of the summary's last line, in order. ``faster``, and all from ``not comparable`` on, are remarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written, what is dropped, and what must not be written."""

    write: tuple[SavedBatch, ...] = ()
    """As measured. Unless all are replaced, an entry of unchanged speed adds its session to the saved entry."""
    new: tuple[Key, ...] = ()
    """The written entries that did not exist before."""
    changed: tuple[Key, ...] = ()
    """The written entries that replace a saved one of another speed or other kernels."""
    dropped: tuple[Key, ...] = ()
    """Stale batch sizes of tests that passed."""
    refused: tuple[tuple[str, int, str], ...] = ()
    """Name, batch size, reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChange:
    """One entry of two baselines. None on the side that does not have it."""

    name: str
    batch_size: int
    old: SavedBatch | None
    new: SavedBatch | None
    comparison: Comparison | Literal["gone"]

    @property
    def added_kernels(self) -> int | None:
        """How many more kernels the new entry has. None unless both were counted."""
        if self.old is None or self.new is None or self.old.kernels is None or self.new.kernels is None:
            return None
        return self.new.kernels - self.old.kernels


def entries(
    reports: Iterable[GraphReport],
    update: Update,
    saved: Mapping[Key, SavedBatch],
    *,
    saved_at: str,
    commit: str = "",
) -> Plan:
    """Select what goes into the baseline. ``saved_at`` is an ISO date, ``commit`` a short hash.

    An entry must have passed every gate. A comparison that was not judged is allowed: nothing was saved, or it is
    replaced on request. The caller passes only reports of tests that passed.
    """
    write: dict[Key, SavedBatch] = {}
    refused: list[tuple[str, int, str]] = []
    for key, measured in sorted(_by_key(reports).items()):
        reason = _ambiguity(measured) or _refusal(*measured[-1])
        if reason:
            refused.append((*key, reason))
            continue
        entry = saved_batch(*measured[-1], saved_at=saved_at, commit=commit)
        if _is_wanted(entry, saved.get(key), update):
            write[key] = entry
    return Plan(
        write=tuple(write.values()),
        new=tuple(key for key in write if key not in saved),
        changed=tuple(key for key in write if key in saved and _replaces(write[key], saved[key], update)),
        refused=tuple(refused),
    )


def counts(
    reports: Sequence[GraphReport], saved: Mapping[Key, SavedBatch], *, complete_run: bool, plan: Plan | None = None
) -> dict[str, int]:
    """The number of batch sizes for each word of :data:`COUNTED`. A model without batch sizes counts once.

    ``new`` and ``changed`` are entries that ``plan`` writes. ``changed`` includes entries with other kernels than
    saved. ``no baseline yet`` entries were measured, and are neither saved nor written.
    """
    counted: Counter[str] = Counter()
    new, changed = (set(plan.new), set(plan.changed)) if plan else (set(), set())
    unsaved: set[Key] = set()
    for report in reports:
        for batch in report.batches:
            key = (report.name, batch.batch_size)
            # Entries without a baseline are counted below.
            counted.update([batch.word] if batch.word != "no baseline yet" else [])
            is_gain = batch.comparison == "faster" and batch.verdict is Verdict.PASSED
            counted.update(["faster"] if is_gain else [])
            counted.update(["not comparable"] if batch.comparison == "not-comparable" and key not in new else [])
            if batch.comparison == "new" and key not in new:
                unsaved.add(key)
            if _has_other_kernels(batch):
                changed.add(key)
        if not report.batches:
            counted[report.verdict.words] += 1
    counted["stale"] = len(stale(reports, saved, complete_run=complete_run))
    counted.update({"new": len(new), "changed": len(changed), "no baseline yet": len(unsaved)})
    return {word: counted[word] for word in COUNTED}


def stale(reports: Iterable[GraphReport], saved: Mapping[Key, SavedBatch], *, complete_run: bool) -> tuple[Key, ...]:
    """Saved entries that a complete run did not measure. Empty for a run of selected tests."""
    if not complete_run:
        return ()
    covered, names = set(), set()
    for report in reports:
        covered |= {(report.name, batch.batch_size) for batch in report.batches}
        if report.verdict.fails or not report.batches:
            # A run that ended early did not reach all of its batch sizes.
            names.add(report.name)
    return tuple(sorted(key for key in saved if key not in covered and key[0] not in names))


def outgrown(stale: Iterable[Key], reports: Iterable[GraphReport], passed: Collection[str]) -> tuple[Key, ...]:
    """The stale entries whose test passed at other batch sizes. ``passed`` are node ids."""
    nodeids: dict[str, set[str]] = {}
    for report in reports:
        nodeids.setdefault(report.name, set()).add(report.nodeid)
    return tuple(key for key in stale if key[0] in nodeids and nodeids[key[0]] <= set(passed))


def compare(
    old: Mapping[Key, SavedBatch], new: Mapping[Key, SavedBatch], *, max_slowdown: float
) -> tuple[EntryChange, ...]:
    """Compare two baselines, ordered by name and batch size. ``max_slowdown`` is a fraction."""
    return tuple(
        EntryChange(
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
    if old.device.hardware_changes(new.device):
        return "not-comparable"
    now = new.sessions[-1]
    figures = [each.comparison(max_slowdown) for each in baseline.figure_changes(old, now).values()]
    return "slower" if "slower" in figures else baseline.change(old, now).comparison(max_slowdown)


def _by_key(reports: Iterable[GraphReport]) -> dict[Key, list[tuple[GraphReport, BatchReport]]]:
    measured: dict[Key, list[tuple[GraphReport, BatchReport]]] = {}
    for report in reports:
        for batch in (each for each in report.batches if each.has_entry):
            measured.setdefault((report.name, batch.batch_size), []).append((report, batch))
    return measured


def _ambiguity(measured: Sequence[tuple[GraphReport, BatchReport]]) -> str:
    # The same test twice is a rerun: the last one counts. Two tests of one name would overwrite each other.
    nodeids = sorted({report.nodeid for report, _ in measured})
    return f"{' and '.join(nodeids)} use the same name: give each its own" if len(nodeids) > 1 else ""


def _refusal(report: GraphReport, batch: BatchReport) -> str:
    judgements = [*report.judgements, *batch.judgements]
    blocking = next((judgement for judgement in judgements if _blocks(judgement)), None)
    if blocking is not None:
        words = blocking.verdict.words
        reason = blocking.reason if words in blocking.reason else f"{words}: {blocking.reason}"
        unjudged = blocking.gate == "speedup" and blocking.verdict is Verdict.NOT_JUDGED
        return f"{reason}; to save it: {report.update_option}" if unjudged else reason
    if not batch.judgements:
        return "nothing was judged"
    facts = {
        "replay was not checked": batch.agreement or batch.scenario,
        "it was not timed": batch.timing,
        "no device": report.device,
    }
    return next((reason for reason, fact in facts.items() if fact is None), "")


def _blocks(judgement: Judgement) -> bool:
    if judgement.gate in ("baseline", "structure") and judgement.verdict is Verdict.NOT_JUDGED:
        return False
    return judgement.verdict is not Verdict.PASSED


def saved_batch(report: GraphReport, batch: BatchReport, *, saved_at: str, commit: str = "") -> SavedBatch:
    """The entry of a batch size that was timed on a known device, as one session."""
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
        sessions=(
            baseline.session_of(timing, report.device, date=saved_at[:10], commit=commit, figures=batch.figures),
        ),
    )


def _is_wanted(entry: SavedBatch, saved: SavedBatch | None, update: Update) -> bool:
    if saved is None or update == "all":
        return True
    if update == "new":
        return False
    is_full = len(saved.sessions) >= baseline.KEPT
    # With a full history, one more equal session would only lengthen the diff.
    return not is_full or _replaces(entry, saved, update) or baseline.arms_moved(saved, entry)


def _replaces(entry: SavedBatch, saved: SavedBatch, update: Update) -> bool:
    return update == "all" or not baseline.is_continued(saved, entry) or bool(baseline.moved_figures(saved, entry))


def _has_other_kernels(batch: BatchReport) -> bool:
    saved, receipt = batch.baseline, batch.receipt
    if not isinstance(saved, SavedBatch) or receipt is None or None in (saved.kernels, receipt.kernels):
        return False
    return dict(saved.kernel_names) != dict(receipt.kernel_names) or saved.kernels != receipt.kernels

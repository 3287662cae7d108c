"""Compare the working tree with another revision: run processes in turn and judge them in two looks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_cudagraph.base_revision.checkout import checked_out, find_revision
from pytest_cudagraph.base_revision.judge import LOOKS, base_change, judge_base
from pytest_cudagraph.base_revision.processes import (
    CollectedOutcome,
    Command,
    RevisionProcess,
    Sample,
    foreign_modules,
    run_order,
)
from pytest_cudagraph.baseline import Key
from pytest_cudagraph.errors import RevisionError
from pytest_cudagraph.protocols import ShowProgress
from pytest_cudagraph.values import BaseComparison, BatchReport, Timing, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstBase:
    """The comparison of two revisions, by test and batch size."""

    revision: str
    max_slowdown: float
    comparisons: Mapping[Key, BaseComparison]

    def find(self, name: str, batch_size: int) -> BaseComparison:
        """What was measured of one test at one batch size, or that nothing was."""
        missing = "the processes of the comparison did not come to it"
        return self.comparisons.get((name, batch_size)) or BaseComparison(revision=self.revision, missing=missing)


def compare_revisions(name: str, command: Command, max_slowdown: float, progress: ShowProgress) -> AgainstBase:
    """Measure the user's tests in the working tree and at the revision ``name``, and pair what was found.

    Raises :class:`~pytest_cudagraph.errors.RevisionError` when the revision or either side cannot be measured.
    Nothing stays behind: no worktree, no process, no file.
    """
    revision = find_revision(command.folder, name)
    _check_root(command.root, revision.top)
    with checked_out(revision) as tree:
        folder = tree.parent
        names = {"base": f"the base, {revision},", "head": "the working tree"}
        trees = {"base": tree, "head": revision.top}
        sides = {
            side: RevisionProcess(
                name=name, top=revision.top, tree=trees[side], command=command, cache=folder / f"cache-{side}"
            )
            for side, name in names.items()
        }
        samples: dict[str, list[Sample]] = {"base": [], "head": []}
        begin_s = time.monotonic()
        for before, look in zip((0, *LOOKS), LOOKS, strict=False):
            for number, order in enumerate(run_order(before, look), start=before):
                for side in order:
                    left = _left_text(time.monotonic() - begin_s, sum(map(len, samples.values())), 2 * look)
                    progress(f"{side}, process {number + 1} of {look}{left}")
                    samples[side].append(sides[side].sample(folder / f"{side}-{number}"))
                _check_imports(samples["base"][-1], revision.top, tree, str(revision))
            comparisons = pair(samples["base"], samples["head"], str(revision))
            verdicts = {judge_base(compared, max_slowdown).verdict for compared in comparisons.values()}
            if Verdict.INCONCLUSIVE not in verdicts:
                break
    return AgainstBase(revision=str(revision), max_slowdown=max_slowdown, comparisons=comparisons)


def _left_text(spent_s: float, done: int, of: int) -> str:
    """``, some 40 s left``, from the processes that have ended. Empty before the first."""
    return f", some {spent_s / done * (of - done):.0f} s left" if done else ""


def _check_root(root: Path, top: Path) -> None:
    """Refuse a root directory above the repository: tests of a checkout would get other names."""
    if root in top.parents:
        raise RevisionError(
            f"pytest's root directory must not lie above the repository, {top}; found {root}\n"
            f"  a checkout has no such folder around it, and its tests would be named otherwise: --rootdir={top}"
        )


def _check_imports(sample: Sample, top: Path, tree: Path, revision: str) -> None:
    foreign = foreign_modules(sample, top, tree)
    if foreign:
        raise RevisionError(
            f"the processes of {revision} must import its own code; found {len(foreign)} of the working tree's files "
            f"imported there, the first {foreign[0]}\n"
            "  an installed package that points into the working tree takes precedence: uninstall it for this run and\n"
            "  let the tests import from the tree (pythonpath = in pytest's configuration, or PYTHONPATH)"
        )


def pair(base: Sequence[Sample], head: Sequence[Sample], revision: str) -> dict[Key, BaseComparison]:
    """The n-th processes of both sides, test by test. What one side lacks is reported and not compared."""
    keys = dict.fromkeys(key for sample in head for key in sample.batches)
    return {key: _paired(key, base, head, revision) for key in keys}


def _paired(key: Key, base: Sequence[Sample], head: Sequence[Sample], revision: str) -> BaseComparison:
    befores, afters = [each.batches.get(key) for each in base], [each.batches.get(key) for each in head]
    nodeid = next(sample.nodeids[key[0]] for sample in head if key in sample.batches)
    for samples, batches, side in ((base, befores, "base"), (head, afters, "head")):
        ends = [sample.end_of(sample.nodeids.get(key[0], nodeid)) for sample in samples]
        missing, odd = _missing(key, samples, batches, ends, side), _odd(ends)
        if missing:
            return BaseComparison(revision=revision, missing=missing, why=odd.why if odd else "")
    ones, others = _timings(befores), _timings(afters)
    has_reference = all(each.reference for each in (*ones, *others))
    comparison = BaseComparison(
        revision=revision,
        base_replay_ns=tuple(each.replay.q25_ns for each in ones),
        head_replay_ns=tuple(each.replay.q25_ns for each in others),
        base_eager_ns=tuple(each.eager.q25_ns for each in ones),
        head_eager_ns=tuple(each.eager.q25_ns for each in others),
        base_reference_ns=tuple(each.reference.q25_ns for each in ones if has_reference and each.reference),
        head_reference_ns=tuple(each.reference.q25_ns for each in others if has_reference and each.reference),
        base_kernels=_kernels(befores[-1]),
        head_kernels=_kernels(afters[-1]),
    )
    return replace(comparison, change=base_change(comparison))


def _timings(batches: Sequence[BatchReport | None]) -> list[Timing]:
    return [batch.timing for batch in batches if batch is not None and batch.timing is not None]


def _kernels(batch: BatchReport | None) -> int | None:
    return batch.receipt.kernels if batch and batch.receipt else None


def _missing(
    key: Key,
    samples: Sequence[Sample],
    batches: Sequence[BatchReport | None],
    ends: Sequence[CollectedOutcome | None],
    side: str,
) -> str:
    """Why a side lacks a latency in one of its processes. Empty if it has all."""
    if all(batch is not None and batch.timing for batch in batches):
        return ""
    verdicts = sorted({batch.verdict.value for batch in batches if batch is not None and not batch.timing})
    if verdicts:
        return f"{', '.join(verdicts)} in the {side}"
    if any(batches):
        return f"not measured in every process of the {side}"
    return _unreported(ends, is_measured=all(key[0] in sample.nodeids for sample in samples))


def _unreported(ends: Sequence[CollectedOutcome | None], *, is_measured: bool) -> str:
    """Why the base has no measurement of a batch size.

    It is new only if the base does not collect the test or does not use the size. A test that exists there and did not
    measure must not pass as new.
    """
    odd = _odd(ends)
    if odd is not None:
        return f"{odd.how} in the base"
    if not any(ends):
        return "new: not in the base"
    return "new: not a batch size of the base" if is_measured else "not measured by its test in the base"


def _odd(ends: Sequence[CollectedOutcome | None]) -> CollectedOutcome | None:
    """How a test ended in the first process in which it did not pass."""
    return next((end for end in ends if end is not None and end.how != "passed"), None)

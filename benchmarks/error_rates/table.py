"""The figures as a table in Markdown: a row per group of scenarios and true speedup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.error_rates.cells import Cell, Tally, quantile_of

from pytest_cudagraph.values import Verdict

HEAD = (
    "| group (scenarios) | true / threshold | trials | passed | failed | inconclusive (worst) | calls "
    "| ms to verdict: median / p95 | pytest-benchmark wrong: min / median |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(cells: Sequence[Cell], tallies: Mapping[str, Tally]) -> Iterator[str]:
    """The table's lines. Wrong of the peer: fails at or above the threshold, passes below it."""
    groups: dict[tuple[str, float], list[Tally]] = {}
    for cell in cells:
        groups.setdefault((cell.scenario.group, cell.relative), []).append(tallies[cell.name])
    yield from HEAD
    for (group, relative), members in groups.items():
        yield _row(group, relative, members)


def _row(group: str, relative: float, members: Sequence[Tally]) -> str:
    whole = Tally()
    for member in members:
        whole.merge(member)
    worst = max(member.verdicts[Verdict.INCONCLUSIVE] / member.trials for member in members)
    cells = (
        f"{group} ({len(members)})",
        f"{relative:.2f}",
        f"{whole.trials}",
        share_text(whole.verdicts[Verdict.PASSED], whole.trials),
        share_text(whole.verdicts[Verdict.FAILED], whole.trials),
        f"{share_text(whole.verdicts[Verdict.INCONCLUSIVE], whole.trials)} ({100 * worst:.0f} %)",
        f"{quantile_of(whole.calls, 0.5)}",
        f"{quantile_of(whole.spent_ms, 0.5)} / {quantile_of(whole.spent_ms, 0.95)}",
        f"{_wrong(whole.peer_min_passes, whole.trials, relative)} / "
        f"{_wrong(whole.peer_median_passes, whole.trials, relative)}",
    )
    return f"| {' | '.join(cells)} |"


def _wrong(passes: int, trials: int, relative: float) -> str:
    return share_text(trials - passes if relative >= 1 else passes, trials)


def share_text(count: int, trials: int) -> str:
    """``0`` only for none at all."""
    return f"{100 * count / trials:.2f} %" if count else "0"

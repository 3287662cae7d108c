"""``pytest-cudagraph compare`` and ``suite``: two files or two runs by the bound of the gate, and their workloads."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pytest_cudagraph import baseline, gate, record, report
from pytest_cudagraph.cli.baselines import figure_text, kernels_text
from pytest_cudagraph.cli.output import FINE, INCONCLUSIVE, REGRESSION, CommandOutput, entries_of, read_run
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.settings.parsing import fraction
from pytest_cudagraph.units import latency_text, percent_text, signed_text
from pytest_cudagraph.values import Column, Latency, Table

_COLUMNS = ("test", "batch", "old", "new", "change", "eager change", "kernels", "verdict")


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``compare``."""
    parser.add_argument("old", metavar="A", help="the old baseline file, or the old --cudagraph-json document")
    parser.add_argument("new", metavar="B", help="the new one of either kind")
    parser.add_argument(
        "--fail-on",
        choices=("slower", "kernels", "any"),
        default="slower",
        help="exit with 1 if a replay is slower (default), has more kernels, or either",
    )
    parser.add_argument(
        "--max-slowdown",
        type=fraction_argument,
        default=0.10,
        metavar="F",
        help="the allowed slowdown of a replay (default: 0.10, 10 %%)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if an entry could not be judged")
    parser.set_defaults(run=_compare)


def fraction_argument(text: str) -> float:
    """A fraction for argparse, whose own message would not say what is allowed."""
    try:
        return fraction()(text)
    except ValueError as allowed:
        raise argparse.ArgumentTypeError(f"{text} is not {allowed}") from None


def _compare(arguments: argparse.Namespace) -> CommandOutput:
    paths = [baseline.any_path(text) for text in (arguments.old, arguments.new)]
    old, new = map(entries_of, paths)
    changes, shown = record.compare(old, new, max_slowdown=arguments.max_slowdown), " -> ".join(map(str, paths))
    if not changes:
        return CommandOutput(lines=[shown, "nothing to compare"], exit_code=INCONCLUSIVE if arguments.strict else FINE)
    allowed = arguments.max_slowdown
    remarks = [(_kernel_changes(each), _figures(each), _why_uncertain(each, allowed)) for each in changes]
    table = Table(
        title=shown,
        columns=tuple(Column(title=title, right=title not in ("test", "verdict")) for title in _COLUMNS),
        rows=tuple(_compared(each) for each in changes),
        remarks=tuple(tuple(filter(None, told)) for told in remarks),
    )
    lines = report.text_of(table)
    counted = Counter(_verdict(change) for change in changes)
    words = [f"{count} {word}" for word, count in sorted(counted.items())]
    others = sum(bool(change.added_kernels or _kernel_changes(change)) for change in changes)
    lines.append(", ".join([*words, f"{others} with other kernels"] if others else words))
    return CommandOutput(lines=lines, exit_code=_exit_code(changes, arguments.fail_on, strict=arguments.strict))


def _compared(change: record.EntryChange) -> tuple[str, ...]:
    old, new = change.old, change.new
    sides = (old, new) if old and new and change.comparison != "not-comparable" else None
    return (
        change.name,
        str(change.batch_size),
        latency_text(old.replay.median_ns) if old else "-",
        latency_text(new.replay.median_ns) if new else "-",
        _moved(*(side.replay for side in sides)) if sides else "-",
        _moved(*(side.eager for side in sides)) if sides else "-",
        _kernels(change),
        _verdict(change),
    )


def _moved(old: Latency, new: Latency) -> str:
    return signed_text(new.median_ns / old.median_ns)


def _verdict(change: record.EntryChange) -> str:
    return change.comparison.replace("-", " ")


def _kernels(change: record.EntryChange) -> str:
    if change.added_kernels and change.old and change.new:
        return f"{change.old.kernels} -> {change.new.kernels}"
    present = change.new or change.old
    return kernels_text(present.kernels if present else None)


def _kernel_changes(change: record.EntryChange) -> str:
    """``+16 aten.mul, -1 aten.silu``. Empty without a change, and where a backend does not name its kernels."""
    if change.old is None or change.new is None or not (change.old.kernel_names and change.new.kernel_names):
        return ""
    return gate.changes_text(change.old.kernel_names, change.new.kernel_names)


def _figures(change: record.EntryChange) -> str:
    """``TTFT 1.2 -> 1.8 ms (+50 %)``: each figure of generations that both have."""
    if change.old is None or change.new is None or change.comparison == "not-comparable":
        return ""
    moved = baseline.figure_changes(change.old, change.new.sessions[-1])
    befores = {name: figure_text(name, figure.before_ns) for name, figure in moved.items()}
    afters = {name: figure_text(name, figure.after_ns).split(" ", 1)[1] for name, figure in moved.items()}
    return ", ".join(f"{before} -> {afters[name]}" for name, before in befores.items())


def _why_uncertain(change: record.EntryChange, max_slowdown: float) -> str:
    """The reason in the words of the gate, which has the same bound."""
    if change.comparison != "uncertain" or change.old is None or change.new is None:
        return ""
    moved = baseline.change(change.old, change.new.sessions[-1])
    return f"{gate.interval_basis_text(moved)}; {percent_text(max_slowdown)} is allowed"


def _exit_code(changes: Sequence[record.EntryChange], fail_on: str, *, strict: bool) -> int:
    slower = any(change.comparison == "slower" for change in changes)
    kernels = any((change.added_kernels or 0) > 0 for change in changes)
    if (slower and fail_on in ("slower", "any")) or (kernels and fail_on in ("kernels", "any")):
        return REGRESSION
    unclear = any(change.comparison not in ("same", "faster", "slower") for change in changes)
    # The backend may not be able to count kernels.
    unclear |= fail_on != "slower" and any(change.added_kernels is None for change in changes)
    return INCONCLUSIVE if strict and unclear else FINE


def add_suite_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``suite``."""
    parser.add_argument("file", type=Path, metavar="RUN.json", help="a document of --cudagraph-json")
    parser.add_argument("other", type=Path, metavar="OTHER.json", nargs="?", help="a later run, to be compared")
    parser.set_defaults(run=_suite)


def _suite(arguments: argparse.Namespace) -> CommandOutput:
    paths = [arguments.file] if arguments.other is None else [arguments.file, arguments.other]
    runs = [_run_with_workloads(path) for path in paths]
    devices = [report.device_text(run.device) if run.device else "" for run in runs]
    lines = [f"{path}: {device}" for path, device in zip(paths, devices, strict=True)]
    if len(runs) == 1:
        tables = report.ranking_tables(runs[0].reports, runs[0].workloads)
        return CommandOutput(lines=[*lines, *(line for table in tables for line in report.text_of(table))])
    return CommandOutput(
        lines=[*lines, *report.changes(*(report.cells_of(run.reports, run.workloads) for run in runs))]
    )


def _run_with_workloads(path: Path) -> report.Run:
    """Raises :class:`~pytest_cudagraph.errors.CudagraphError` for any other file."""
    run = read_run(path)
    if not run.workloads:
        raise CudagraphError(f"{path}: no test of this run has the mark workload")
    return run

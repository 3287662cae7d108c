"""``pytest-cudagraph suite``: the rankings of a saved run, or what moved between two."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_cudagraph import report
from pytest_cudagraph.cli.output import CommandOutput, read_run
from pytest_cudagraph.errors import CudagraphError


def add_command(parser: argparse.ArgumentParser) -> None:
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

"""``pytest-cudagraph suite``: the rankings of a saved run, or what moved between two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_cudagraph import report
from pytest_cudagraph.cli.output import CommandOutput, read_document
from pytest_cudagraph.errors import CudagraphError


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``suite``."""
    parser.add_argument("file", type=Path, metavar="RUN.json", help="a document of --cudagraph-json")
    parser.add_argument("other", type=Path, metavar="OTHER.json", nargs="?", help="a later run, to be compared")
    parser.set_defaults(run=_suite)


def _suite(arguments: argparse.Namespace) -> CommandOutput:
    paths = [arguments.file] if arguments.other is None else [arguments.file, arguments.other]
    found = [_workloads(path) for path in paths]
    lines = [f"{path}: {report.device_of_document(each)}" for path, each in zip(paths, found, strict=True)]
    tables = report.rankings(found[0]) if len(found) == 1 else report.changes(*found)
    return CommandOutput(lines=[*lines, *tables])


def _workloads(path: Path) -> dict[str, Any]:
    """A run with workloads. Raises :class:`~pytest_cudagraph.errors.CudagraphError` for any other file."""
    found, _ = read_document(path)
    try:
        report.rankings(found)
    except ValueError as exc:
        raise CudagraphError(f"{path}: {exc}") from exc
    if not found.get("workloads"):
        raise CudagraphError(f"{path}: no test of this run has the mark workload")
    return found

"""``pytest-cudagraph``: what can be asked outside of a test run.

Exit codes: 0 fine, 1 a regression or an unfit machine, 2 inconclusive under ``--strict``, 4 a mistake of use or a file
that cannot be read.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pytest_cudagraph import report
from pytest_cudagraph.cli import baselines, comparison, doctor, explain
from pytest_cudagraph.cli.answer import USAGE, Answer
from pytest_cudagraph.errors import CudagraphError

__all__ = ["main"]


_EXIT_CODES = (
    "exit codes: 0 fine; 1 a regression (compare) or a machine unfit to judge speed (doctor); "
    "2 something cannot be told (compare --strict); 4 a mistake of use, or a file that cannot be read"
)


class _Parser(argparse.ArgumentParser):
    """Also of every subcommand: each ends its help with the exit codes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(epilog=_EXIT_CODES, **kwargs)

    def error(self, message: str) -> NoReturn:
        # argparse ends with 2, which here means inconclusive.
        self.exit(USAGE, f"{self.prog}: {message}\n{self.format_usage()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; mistakes in the command line itself raise ``SystemExit(4)``."""
    arguments = _parser().parse_args(argv)
    try:
        answer: Answer = arguments.run(arguments)
    except CudagraphError as exc:
        print(f"pytest-cudagraph: {exc}", file=sys.stderr)
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without "µ" is a reason for a "?", not for a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        for line in answer.lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough (``| head``); what Python would still flush at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.exit_code


def _parser() -> _Parser:
    parser = _Parser(prog="pytest-cudagraph", description="Baselines, reports and the state of this machine.")
    parser.add_argument("--version", action="version", version=f"pytest-cudagraph {doctor.version('pytest-cudagraph')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    baselines.add_commands(commands.add_parser("baseline", help="list, show and prune baseline files"))
    comparison.add_command(commands.add_parser("compare", help="compare two baseline files"))
    explain.add_command(commands.add_parser("explain", help="what a hazard is, and how it is mended"))
    command = commands.add_parser("report", help="show the table of a --cudagraph-json document")
    command.add_argument("file", type=Path, metavar="FILE.json")
    command.set_defaults(run=_report)
    doctor.add_command(commands.add_parser("doctor", help="this machine: its device, its health, its noise floor"))
    return parser


def _report(arguments: argparse.Namespace) -> Answer:
    try:
        found = json.loads(arguments.file.read_text(encoding="utf-8-sig"))
        rows = report.rows_of_document(found)
    except OSError as exc:
        raise CudagraphError(f"{arguments.file}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise CudagraphError(f"{arguments.file}: {exc}") from exc
    counted = Counter(row.word for row in rows)
    return Answer(lines=[*_device_of(found), *report.render(rows), *report.closing([], counted)])


def _device_of(document: dict[str, Any]) -> list[str]:
    device = document.get("device")
    if not isinstance(device, dict):
        return []
    kind = "cpu: " if device.get("kind") == "cpu" else ""
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return [f"{kind}{device.get('name')}{driver}, torch {device.get('torch')}"]

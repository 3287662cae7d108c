"""The command ``pytest-cudagraph``, with its subcommands ``explain`` and ``report``."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_cudagraph import files, report
from pytest_cudagraph.cli import baselines, compare, doctor, first_test, history
from pytest_cudagraph.cli.output import USAGE, CommandOutput, read_run, write_page
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.foreign import printable, printable_lines

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_INDEX = "README.md"
_SUFFIX = ".md"


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="the id of a hazard; without an id, all hazards are listed"
    )
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> CommandOutput:
    pages = _pages()
    if not arguments.ids:
        return CommandOutput(lines=_listed(pages))
    lines: list[str] = []
    for id_ in arguments.ids:
        if id_ not in pages:
            raise CudagraphError(_unknown(id_, sorted(pages)))
        lines += ["", *pages[id_].splitlines()] if lines else pages[id_].splitlines()
    return CommandOutput(lines=lines)


def _unknown(id_: str, known: list[str]) -> str:
    near = difflib.get_close_matches(id_.lower(), known, n=3, cutoff=0.5)
    if near:
        return f"no hazard is called {id_}; nearest: {', '.join(near)} (explain without an id lists all)"
    return f"no hazard is called {id_}; there are: {', '.join(known)}"


def _listed(pages: dict[str, str]) -> list[str]:
    """Two lines per id, from the third line of its page, such as ``Silent: the call writes to its own input``."""
    lines = []
    for id_, page in pages.items():
        kind, _, what = page.splitlines()[2].partition(": ")
        lines += [f"{id_} ({kind.lower()})", f"  {what.rstrip('.')}"]
    return lines


def _pages() -> dict[str, str]:
    """Every page by its id. Raises :class:`~pytest_cudagraph.errors.CudagraphError` if the pages are missing."""
    pages = {each.name: each for each in _folder().iterdir() if each.name.endswith(_SUFFIX)}
    pages.pop(_INDEX, None)
    return {name.removesuffix(_SUFFIX): pages[name].read_text(encoding="utf-8") for name in sorted(pages)}


def _folder() -> Traversable:
    installed = resources.files(__package__).joinpath("hazards")
    if installed.is_dir():
        return installed
    # In a source tree and its editable install, the pages are in docs. Only a wheel contains them.
    source = Path(__file__).resolve().parents[3] / "docs" / "hazards"
    if source.is_dir():
        return source
    raise CudagraphError(f"the pages on hazards are missing: neither {installed} nor {source} is a folder")


_EXIT_CODES = (
    "exit codes: 0 success; 1 a regression (compare), a failed model (check), or a machine unfit to judge speed "
    "(doctor); 2 an entry could not be judged (compare --strict); 4 a usage error, such as an unreadable file"
)


class _Parser(argparse.ArgumentParser):
    """The parser of the command and of every subcommand; each help ends with the exit codes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(epilog=_EXIT_CODES, **kwargs)

    def error(self, message: str) -> NoReturn:
        # argparse exits with 2, which here means inconclusive.
        self.exit(USAGE, f"{self.prog}: {printable_lines(message)}\n{self.format_usage()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong command line raises ``SystemExit(4)``."""
    arguments = make_parser().parse_args(argv)
    try:
        output: CommandOutput = arguments.run(arguments)
    except CudagraphError as exc:
        return _failed(str(exc))
    except OSError as exc:  # for one, Path.is_dir of older Pythons raises for a name that is too long
        return _failed(f"{exc.filename}: {exc.strerror}")
    if sys.stdout is None:  # closed by the shell: >&-
        return _failed("the output cannot be written (stdout is closed)")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without "µ" shows a "?" instead.
        sys.stdout.reconfigure(errors="replace")
    try:
        for line in output.lines:
            print(printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has stopped (``| head``). Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(f"the output cannot be written ({exc.strerror})")
    return output.exit_code


def _failed(reason: str) -> int:
    print(printable_lines(f"pytest-cudagraph: {reason}"), file=sys.stderr)
    return USAGE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(prog="pytest-cudagraph", description="Baselines, reports and the state of this machine.")
    parser.add_argument("--version", action="version", version=f"pytest-cudagraph {doctor.version('pytest-cudagraph')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    baselines.add_commands(commands.add_parser("baseline", help="list, show, prune and merge baseline files"))
    compare.add_command(commands.add_parser("compare", help="compare two baseline files or two runs"))
    first_test.add_command(commands.add_parser("check", help="test a model without writing a test"))
    _add_explain(commands.add_parser("explain", help="explain a hazard and its fix"))
    command = commands.add_parser("report", help="show the table of a --cudagraph-json document")
    command.add_argument("file", type=Path, metavar="FILE.json")
    command.add_argument("--html", type=Path, metavar="PAGE", help="also write the document as an HTML page")
    command.set_defaults(run=_report)
    history.add_command(commands.add_parser("history", help="when each side of the saved entries moved"))
    compare.add_suite_command(commands.add_parser("suite", help="rank the workloads of a --cudagraph-json document"))
    doctor.add_command(commands.add_parser("doctor", help="test whether this machine can judge speed"))
    return parser


def _report(arguments: argparse.Namespace) -> CommandOutput:
    run = read_run(arguments.file)
    rows = [row for each in run.reports for row in report.rows_of(each)]
    device = [report.device_text(run.device)] if run.device else []
    lines = [*device, *report.render(rows), *report.closing([], Counter(row.word for row in rows))]
    if arguments.html is not None:
        if files.is_same_path(arguments.html, arguments.file):
            raise CudagraphError(f"{arguments.html}: the page would replace the document; nothing was changed")
        write_page(arguments.html, _page(arguments.file, run))
        lines.append(f"wrote {arguments.html}")
    return CommandOutput(lines=lines)


def _page(path: Path, run: report.Run) -> str:
    try:
        return report.page(run)
    except ValueError as exc:
        raise CudagraphError(f"{path}: {exc}") from exc

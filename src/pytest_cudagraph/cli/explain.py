"""``pytest-cudagraph explain``: the page of a hazard, as the message of a failing test names it."""

from __future__ import annotations

import argparse
import difflib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_cudagraph.cli.answer import Answer
from pytest_cudagraph.errors import CudagraphError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_INDEX = "README.md"
_SUFFIX = ".md"


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``explain``."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="the id of a hazard; without one, all of them")
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> Answer:
    pages = _pages()
    if not arguments.ids:
        return Answer(lines=_listed(pages))
    lines: list[str] = []
    for id_ in arguments.ids:
        if id_ not in pages:
            raise CudagraphError(_unknown(id_, sorted(pages)))
        lines += ["", *pages[id_].splitlines()] if lines else pages[id_].splitlines()
    return Answer(lines=lines)


def _unknown(id_: str, known: list[str]) -> str:
    near = difflib.get_close_matches(id_.lower(), known, n=3, cutoff=0.5)
    if near:
        return f"no hazard is called {id_}; nearest: {', '.join(near)} (explain without an id lists all)"
    return f"no hazard is called {id_}; there are: {', '.join(known)}"


def _listed(pages: dict[str, str]) -> list[str]:
    """Two lines an id; the third line of each page says ``Loud: what it is`` or ``Silent: what it is``."""
    lines = []
    for id_, page in pages.items():
        kind, _, what = page.splitlines()[2].partition(": ")
        lines += [f"{id_} ({kind.lower()})", f"  {what.rstrip('.')}"]
    return lines


def _pages() -> dict[str, str]:
    """Every page by its id. Raises :class:`~pytest_cudagraph.errors.CudagraphError` where none was installed."""
    found = {each.name: each for each in _folder().iterdir() if each.name.endswith(_SUFFIX)}
    found.pop(_INDEX, None)
    return {name.removesuffix(_SUFFIX): found[name].read_text(encoding="utf-8") for name in sorted(found)}


def _folder() -> Traversable:
    installed = resources.files(__package__).joinpath("hazards")
    if installed.is_dir():
        return installed
    # A source tree, or an editable install of one: the wheel is where docs/hazards becomes part of the package.
    source = Path(__file__).resolve().parents[3] / "docs" / "hazards"
    if source.is_dir():
        return source
    raise CudagraphError(f"the pages on hazards are missing: neither {installed} nor {source} is a folder")

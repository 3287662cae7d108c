"""The HTML page of a run, from its JSON document alone. ``pytest-cudagraph report --html`` makes the same one later.

A page is self-contained: all text is escaped, and no request leaves it.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.foreign import printable_lines
from pytest_cudagraph.report.document import Run
from pytest_cudagraph.report.page_tests import FACTS, kind_of, page_rows, page_tests
from pytest_cudagraph.report.run_tables import named
from pytest_cudagraph.report.table import Row, device_text, rows_of, without_common_folder
from pytest_cudagraph.values import Finding, Site

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDED_ROWS = 400
"""With more rows, table and tests are folded, so that the page opens at once."""

_WORST = ("not captured", "wrong", "failed", "slower", "inconclusive", "no baseline yet", "not judged", "passed")


def page(run: Run) -> str:
    """The page as text.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError` without jinja2, and :class:`ValueError` for numbers that no
    measurement gives.
    """
    try:
        view = _view(run, [row for report in run.reports for row in rows_of(report)])
    except (ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"damaged: {error!r}") from error
    return rendered("run.html", view)


def _view(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    shown = page_rows(run.reports, without_common_folder(rows))
    folded = len(rows) > _FOLDED_ROWS
    tests, counts = page_tests(run.reports, folded=folded), _counts(rows)
    counted = ", ".join(f"{each['number']} {each['word']}" for each in counts)
    facts = [(title, getattr(run.device, name, None)) for name, title in _MACHINE.items()]
    return {
        "title": f"CUDA graphs: {counted or 'nothing measured'}",
        "subtitle": " · ".join(_subtitle(run)),
        "counts": counts,
        "rows": shown,
        "rows_folded": folded,
        "compiled": any(row.compiled_ns is not None for row in rows),
        "limits": any(row.limit for row in shown),
        "saved": any(test["sessions"] for test in tests),
        "tests": tests,
        "fact_titles": FACTS,
        "findings": _findings(run),
        "tables": run.tables,
        "machine": [(title, str(fact)) for title, fact in facts if fact is not None],
    }


def _counts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    counted = Counter(row.word for row in rows)
    words = sorted(counted, key=lambda word: _WORST.index(word) if word in _WORST else len(_WORST))
    return [{"word": word, "number": counted[word], "kind": kind_of(word)} for word in words]


def _subtitle(run: Run) -> list[str]:
    """``2026-11-22 10:00 UTC``, ``commit 1a2b3c4 on main, with uncommitted changes``, the device."""
    parts = [f"{run.date[:16].replace('T', ' ')} UTC"] if run.date else []
    if run.commit:
        dirty = ", with uncommitted changes" if run.commit.get("dirty") else ""
        parts.append(f"commit {str(run.commit.get('id'))[:7]} on {run.commit.get('branch')}{dirty}")
    return [*parts, device_text(run.device)] if run.device else parts


_MACHINE = {
    "name": "device",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "python": "Python",
    "host_cpu": "host CPU",
    "threads": "torch threads",
    "platform": "platform",
    "mig": "MIG profile",
    "power_limit_w": "power limit in W",
    "clocks": "clocks",
}


def _findings(run: Run) -> list[Mapping[str, Any]]:
    """Each finding of the audit once, with the tests that have it. Errors first, then warnings."""
    tests: dict[Finding, list[str]] = {}
    for report in run.reports:
        for finding in report.findings:
            tests.setdefault(finding, []).append(report.name)
    shown = [_finding(finding, names, run.rootdir) for finding, names in tests.items()]
    return sorted(shown, key=lambda each: (each["level"] != "error", each["level"] != "warning"))


def _finding(finding: Finding, names: Iterable[str], root: str) -> dict[str, Any]:
    return {
        "level": finding.level,
        "id": finding.id,
        "place": _place(finding, root),
        "message": finding.message,
        "evidence": finding.evidence,
        "remedy": f"accepted: {finding.accepted}" if finding.accepted else finding.fix,
        "kind": {"error": "bad", "warning": "warn"}.get(finding.level, "none"),
        "tests": named(names),
    }


def _place(finding: Finding, root: str) -> str:
    """``model.py:12 in forward, called from tests/test_model.py:4``. Below the root directory, paths are relative."""
    site, caller = finding.site, finding.called_from
    if site is None:
        return ""
    inside = f" in {site.function}" if site.function else ""
    return _line(site, root) + inside + (f", called from {_line(caller, root)}" if caller else "")


def _line(site: Site, root: str) -> str:
    return f"{site.file.removeprefix(f'{root}/') if root else site.file}:{site.line}"


class _Inline(NamedTuple):
    """A style or script in the page, and its hash, by which the page's policy allows this text only."""

    text: Markup
    hash: str


def rendered(template: str, view: Mapping[str, Any]) -> str:
    """The page of a template. Raises :class:`~pytest_cudagraph.errors.CudagraphError` without jinja2."""
    try:
        environment = _environment()
    except ImportError as error:
        raise CudagraphError(f"a page needs jinja2 ({error}): pip install 'pytest-cudagraph[html]'") from error
    inline = {"style": _inline("page.css"), "script": _inline("page.js")}
    return environment.get_template(template).render(**inline, **view)


def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    # StrictUndefined: a name that a template misspells is an error and no empty cell.
    return Environment(
        autoescape=True,
        finalize=_shown,
        loader=FunctionLoader(_source),
        trim_blocks=True,
        undefined=StrictUndefined,
    )


def _source(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """Text from outside without terminal escapes and marks that turn the direction of writing."""
    return value if hasattr(value, "__html__") else printable_lines(str(value))


def _inline(name: str) -> _Inline:
    from markupsafe import Markup

    text = _source(name)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return _Inline(Markup(text), f"sha256-{digest}")

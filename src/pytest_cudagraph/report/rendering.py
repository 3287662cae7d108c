"""Self-contained HTML pages from the templates of this package. All text is escaped, and no request leaves a page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.foreign import printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


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


def drawn(svg: str) -> Markup:
    """A plot of :mod:`~pytest_cudagraph.report.plots`, which holds numbers only."""
    from markupsafe import Markup

    return Markup(svg)

"""What mkdocs does beside its settings (``mkdocs.yml``): links that leave ``docs/``, and docstrings as Markdown."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import griffe

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\((\.\.?/[^)#\s]*|[\w.-][\w./-]*)(#[^)\s]*)?\)")
_KIND_OF_BLOCK = re.compile(r"^```(\w+) \w+$", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A file of the repository outside of ``docs/`` is named, not linked: the site has no page of it."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    parts = _FENCE.split(_KIND_OF_BLOCK.sub(r"```\1", markdown))
    return "".join(part if part.startswith("```") else _LINK.sub(lambda m: _named(m, folder), part) for part in parts)


def _named(link: re.Match[str], folder: str) -> str:
    text, target, _ = link.groups()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        return link.group()
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


class MarkdownDocstrings(griffe.Extension):
    """The docstrings have roles and ``::``, which Markdown does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^::$|(?<=:):$", "", text.replace("``", "`"))

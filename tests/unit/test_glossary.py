"""``docs/glossary.md`` explains every public class and every name of a module that is no plain English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_cudagraph

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PLAIN = frozenset(
    "columns command compare doctor environment exceptions fields frames history new_values options parsing processes "
    "sampling schema table timer units".split()
)


def names_of_modules():
    package = ROOT / "src" / "pytest_cudagraph"
    files = {path.stem for path in package.rglob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in package.rglob("__init__.py")} - {"pytest_cudagraph"}


def test_every_public_class_is_explained():
    public = [name for name in pytest_cudagraph.__all__ if isinstance(getattr(pytest_cudagraph, name), type)]

    assert [name for name in public if f"`{name}`" not in GLOSSARY] == []


def test_every_module_name_is_explained_or_plain_english():
    words = re.sub("(?<=[a-z])(?=[A-Z])|[_-]", " ", GLOSSARY).lower()
    unknown = {name for name in names_of_modules() if name.replace("_", " ").removesuffix("s") not in words}

    assert unknown - PLAIN == set()
    assert PLAIN <= unknown, "what the glossary explains, or what no module is called, need not be listed"

"""``docs/glossary.md`` explains every public class and every name of a module that is no plain English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest_cudagraph

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
WORDS = re.sub("(?<=[a-z])(?=[A-Z])|[_-]", " ", GLOSSARY).lower()
PLAIN = set(
    "columns command compare doctor environment exceptions fields files frames history new options parsing processes "
    "sampling schema table timer units values".split()
)


def names_of_modules():
    package = ROOT / "src" / "pytest_cudagraph"
    files = {path.stem for path in package.rglob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in package.rglob("__init__.py")} - {"pytest_cudagraph"}


def test_every_public_class_is_explained():
    public = [name for name in pytest_cudagraph.__all__ if isinstance(getattr(pytest_cudagraph, name), type)]

    assert [name for name in public if f"`{name}`" not in GLOSSARY] == []


def is_explained(name):
    return name.removesuffix("s") in WORDS


def test_every_module_name_is_explained_or_plain_english():
    names = [name.replace("_", " ") for name in names_of_modules()]
    parts = {part for name in names if not is_explained(name) for part in name.split()}

    assert {part for part in parts if not is_explained(part)} - PLAIN == set()

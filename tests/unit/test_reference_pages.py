"""The reference leaves nothing out: every field, every option and every public name stands there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
import re
from pathlib import Path

import pytest

import pytest_cudagraph
from pytest_cudagraph import errors, values
from pytest_cudagraph.cli import make_parser
from pytest_cudagraph.decoding import guided_results, results
from pytest_cudagraph.decoding.errors import FAILURES
from pytest_cudagraph.decoding.modes import results as modes_results

ROOT = Path(__file__).parents[2]
REPORTS = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
COMMAND = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
INTERNAL = {"min_source", "update_option", "extended", "inner_calls"}
"""What only our own messages are made of."""


@pytest.mark.parametrize(
    "kind",
    [
        values.GraphReport,
        values.BatchReport,
        values.Receipt,
        values.Agreement,
        values.Timing,
        values.Latency,
        values.Judgement,
        results.Generation,
        results.GenerationReceipt,
        results.GenerationTimes,
        results.TokenAgreement,
        results.Prefill,
        results.PrefillBytes,
        results.Lookup,
        guided_results.Guided,
        guided_results.GuidedOutput,
        guided_results.GuidedTimes,
        modes_results.EngineModes,
        modes_results.EngineMode,
        modes_results.ModeTokens,
        modes_results.ModeFailure,
        values.Finding,
    ],
)
def test_every_attribute_of_a_report_is_described(kind):
    attributes = {field.name for field in dataclasses.fields(kind)} - INTERNAL
    assert {name for name in attributes if f"`{name}`" not in REPORTS} == set()


def test_every_field_of_the_document_is_described():
    section = REPORTS.partition("\n## The JSON document\n")[2]
    found = json.loads((ROOT / "tests" / "golden" / "report" / "document.json").read_text(encoding="utf-8"))
    assert {key for key in _keys(found) if f"`{key}`" not in section and f"`{key}[]`" not in section} == set()


def test_every_verdict_is_named():
    assert [each.value for each in values.Verdict if f"`{each.value}`" not in REPORTS] == []


def test_every_command_and_option_is_described():
    assert {word for word in _words(make_parser()) if word not in COMMAND} == set()


def test_every_public_name_is_on_the_page_of_the_library_or_of_errors():
    library = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (pytest_cudagraph\..*)$", library, re.M)

    assert [pkgutil.resolve_name(name) for name in named]
    failures = {failure.__name__ for failure in FAILURES.values()}
    public = {name for name in pytest_cudagraph.__all__ if not hasattr(errors, name)} - failures
    assert {name.rpartition(".")[2] for name in named} == public


def _keys(found):
    """Keys at any depth; those of settings, receipt, check, JUnit and kernels have places of their own."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from _keys(value) if key not in ("settings", "receipt", "check", "properties", "kernel_names") else ()
    elif isinstance(found, list):
        for each in found:
            yield from _keys(each)


def _words(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"`{name}" if parser.prog == "pytest-cudagraph" and name != "baseline" else name
                yield from _words(command)
        else:
            yield from (option for option in action.option_strings if option.startswith("--"))

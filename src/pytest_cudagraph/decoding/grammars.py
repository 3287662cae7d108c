"""The grammars that guide a generation, and the parser that judges what comes out. It is never the matcher."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_cudagraph.decoding.guided_results import GrammarKind
from pytest_cudagraph.errors import InputError, first_line
from pytest_cudagraph.foreign import value_text

MISSING_EXTRA = "guided generation needs xgrammar and jsonschema: pip install 'pytest-cudagraph[guided]'"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output may be. Made by :func:`json_schema`, :func:`regex`, :func:`ebnf`, :func:`choice` and
    :func:`python_source`.
    """

    kind: GrammarKind
    source: str
    """The schema as JSON, the pattern, or the rules in EBNF."""
    parse: Callable[[str], object] | None = field(compare=False, repr=False)
    """Raises for an invalid output. None: nothing but the matcher knows the grammar."""

    def problem(self, output: bytes) -> str:
        """What :attr:`parse` says about an output. Empty for a valid one."""
        if self.parse is None:
            return ""
        try:
            self.parse(output.decode())
        # Also RecursionError and MemoryError: a parser may raise anything for a text that it does not take.
        except Exception as error:
            return first_line(error)
        return ""


def json_schema(schema: Mapping[str, Any] | str) -> Grammar:
    """JSON of a schema, with spaces as ``json.dumps`` writes them. The schema is a mapping or JSON text.

    An output is valid if a strict ``json.loads`` takes it (no control character in a string, no NaN, no key twice)
    and jsonschema finds no error. Raises :class:`~pytest_cudagraph.errors.InputError` for a schema that is none, and
    without jsonschema.
    """
    try:
        from jsonschema import exceptions, validators
    except ImportError as missing:
        raise InputError(MISSING_EXTRA) from missing
    try:
        found = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
        validator = validators.validator_for(found)
        validator.check_schema(found)
    except (TypeError, ValueError, exceptions.SchemaError) as error:
        why = error.message if isinstance(error, exceptions.SchemaError) else str(error)
        raise InputError(f"json_schema takes a JSON schema; found {value_text(schema)}: {why}") from None
    if not isinstance(found, dict):
        raise InputError(f"json_schema takes a mapping or its JSON text; found {value_text(schema)}")
    check = validator(found).validate

    def parse(text: str) -> None:
        check(json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice))

    return Grammar("json_schema", json.dumps(found), parse)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def regex(pattern: str) -> Grammar:
    """Text that ``re.fullmatch`` takes. Raises :class:`~pytest_cudagraph.errors.InputError` for an invalid pattern."""
    try:
        compiled = re.compile(pattern) if isinstance(pattern, str) else None
    except re.error as error:
        raise InputError(f"regex takes a pattern of Python's re; found {value_text(pattern)}: {error}") from None
    if compiled is None:
        raise InputError(f"regex takes a pattern of Python's re; found {value_text(pattern)}")

    def parse(text: str) -> None:
        if compiled.fullmatch(text) is None:
            raise ValueError("re.fullmatch finds no match")

    return Grammar("regex", pattern, parse)


def ebnf(rules: str, parse: Callable[[str], object] | None = None) -> Grammar:
    """Text of a grammar in xgrammar's EBNF, whose first rule is ``root``.

    ``parse`` raises for an invalid text. Without it validity is not judged, because only the matcher knows the grammar.
    Raises :class:`~pytest_cudagraph.errors.InputError`.
    """
    if not isinstance(rules, str):
        raise InputError(f"ebnf takes rules as text; found {value_text(rules)}")
    if parse is not None and not callable(parse):
        raise InputError(f"parse is a function that raises for an invalid text; found {value_text(parse)}")
    return Grammar("ebnf", rules, parse)


def choice(options: Iterable[str]) -> Grammar:
    """One of some texts. Raises :class:`~pytest_cudagraph.errors.InputError`."""
    texts = () if isinstance(options, str) or not isinstance(options, Iterable) else tuple(options)
    if not texts or not all(isinstance(each, str) and each for each in texts):
        raise InputError(f"choice takes texts that are not empty, such as ['yes', 'no']; found {value_text(options)}")

    def parse(text: str) -> None:
        if text not in texts:
            raise ValueError("it is none of the options")

    # Literals of EBNF have the escapes of JSON.
    literals = " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
    return Grammar("choice", f"root ::= {literals}", parse)


_PYTHON = r"""
root ::= statement+
statement ::= simple "\n" | header ":\n" ("    " simple "\n")+
header ::= "if " value | "while " value | "for " name " in " value | "def " name "(" (name)? ")"
simple ::= "pass" | name " = " value | name " += " value | call
value ::= term (operator term)?
operator ::= " + " | " - " | " * " | " == " | " < " | " and " | " or "
term ::= name | number | string | "True" | "False" | "None" | "[" (items)? "]" | call
items ::= term (", " term)?
call ::= ("print" | "len" | "range" | "sum" | "str" | "int") "(" (items)? ")"
name ::= [a-z] | [a-z] [a-z0-9]{0,8} "_" [a-z0-9]{1,8}
number ::= "0" | [1-9] [0-9]{0,8}
string ::= "\"" [ !#-\[\]-~]{0,40} "\""
"""
"""A name is one letter, or has an underscore: then it is no keyword."""


def python_source() -> Grammar:
    """A module in a small part of Python: assignments, calls, and ``if``, ``while``, ``for``, ``def`` with one level.

    An output is valid if ``compile`` takes it. It is never run.
    """
    return Grammar("python_source", _PYTHON, _compile_python)


def _compile_python(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(text, "<output>", "exec", dont_inherit=True)

"""Branches of a function whose condition reads given Python values."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from types import CodeType

from pytest_cudagraph.sources.syntax import function_of, name_of, tests_of

_NUMBERS = frozenset({"len", "int", "float", "bool", "abs", "round", "min", "max"})


def branches_on(code: CodeType, attributes: Collection[str], variables: Collection[str]) -> dict[int, str]:
    """The lines of conditions (``if``, ``while``, ``a if b else c``) that read one of the values, and its name.

    ``attributes`` are paths such as ``encoder.calls``. ``self.calls`` reads it, and so does ``self.encoder.calls``.
    ``variables`` are names of globals. A local name of such a value counts too.
    """
    known = {*code.co_names, *code.co_freevars}
    paths = [path for path in map(_steps, attributes) if path[-1] in known]
    closed_over = {path[0] for path in paths if len(path) == 1 and path[0] in code.co_freevars}
    names = {name: name for name in {*variables, *closed_over} if name in known and name not in code.co_varnames}
    if not paths and not names:
        return {}
    tree, lines = function_of(code), {line for *_, line in code.co_lines()}
    names |= dict(_local_names(tree, paths, names))
    found = ((test.lineno, _read_in(test, paths, names)) for test in tests_of(tree))
    return {line: name for line, name in found if name and line in lines}


def _local_names(tree: ast.AST, paths: list[tuple[str, ...]], names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The local names that are assigned from one of the values without a call: ``step = self.steps + 1``."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(node, ast.Assign | ast.NamedExpr) or not isinstance(target, ast.Name):
            continue
        calls = (each for each in ast.walk(node.value) if isinstance(each, ast.Call))
        name = _read_in(node.value, paths, names)
        if name and all(name_of(call.func) in _NUMBERS for call in calls):
            yield target.id, name


def _read_in(tree: ast.AST, paths: list[tuple[str, ...]], names: dict[str, str]) -> str:
    """The name of the first of the values that an expression reads. Empty if it reads none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.Attribute):
            read = _attributes_of(node)
            if any(path[-len(read) :] == read for path in paths):
                return ".".join(read)
    return ""


def _attributes_of(node: ast.expr) -> tuple[str, ...]:
    """``("layers", "calls")`` for ``self.layers[0].calls``."""
    if isinstance(node, ast.Subscript):
        return _attributes_of(node.value)
    return (*_attributes_of(node.value), node.attr) if isinstance(node, ast.Attribute) else ()


def _steps(path: str) -> tuple[str, ...]:
    """``("layers", "calls")`` for ``layers[0].calls``."""
    return tuple(step.partition("[")[0] for step in path.split("."))

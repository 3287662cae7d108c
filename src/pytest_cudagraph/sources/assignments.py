"""Where a class assigns an attribute: the line that a replay, which runs no Python, leaves out."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator

from pytest_cudagraph.sources import origin_of
from pytest_cudagraph.values import Site

_BEFORE_CALLS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "reset_parameters"})


def assigned_at(kind: type, attribute: str) -> Site | None:
    """The last line of ``kind``'s own code that assigns ``attribute``, or an entry of it, outside of its construction.

    None where there is none to see: another name for the object, ``setattr``, a library's code.
    """
    for each in kind.__mro__:
        found = _sites(each).get(attribute)
        if found is not None:
            return found
    return None


@functools.lru_cache(maxsize=256)
def _sites(kind: type) -> dict[str, Site]:
    try:
        file, (lines, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
        if file is None or origin_of(file) == "machinery":
            return {}
        linecache.checkcache(file)
        tree = ast.parse(inspect.cleandoc("\n" + "".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made at run time, built in, or edited since it was imported
        return {}
    return {name: Site(file=file, line=first + line - 1, function=function) for name, line, function in _assigned(tree)}


def _assigned(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in _BEFORE_CALLS:
            for node in ast.walk(function):
                yield from ((name, node.lineno, function.name) for name in _targets(node))  # type: ignore[attr-defined]


def _targets(node: ast.AST) -> list[str]:
    """``cached`` for ``self.cached = ...``, ``self.cached += ...``, ``self.cached[key] = ...``."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    bases = [part.value if isinstance(part, ast.Subscript) else part for part in parts]
    return [base.attr for base in bases if isinstance(base, ast.Attribute)]

"""Facts from the source text of a model: devices by name, branches for a GPU, assigned attributes."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from pytest_cudagraph.sources.user_lines import origin_of
from pytest_cudagraph.values import Site

_BEFORE_CALLS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "reset_parameters"})


def assigned_at(kind: type, attribute: str) -> Site | None:
    """The last line in the class that assigns ``attribute``, or an entry of it, after construction.

    None for ``setattr``, another name of the object, and the code of a library.
    """
    for each in kind.__mro__:
        found = _sites(each).get(attribute)
        if found is not None:
            return found
    return None


def made_on_host(kind: type, attribute: str) -> bool:
    """Whether the class makes ``attribute``, or what it puts into it, on the host, as far as its source shows it.

    In its construction by a call that names no device, in a later method by a factory of torch in a function that names
    none. False where the source does not show it.
    """
    values = [value for each in kind.__mro__ for name, value in _values(each) if name == attribute]
    made = [value for value in values if not value.is_blank]
    return bool(made) and all(value.is_made_on_host for value in made)


_DEVICE_WORDS = frozenset({"device", "cuda", "to", "get_default_device", "type_as"})
_FACTORIES = frozenset(
    "arange empty eye full hann_window linspace logspace ones rand randint randn randperm tensor zeros".split()
)
_MOVES = frozenset({"_apply", "to", "cuda"})
"""Methods that move what a module holds."""

_CONTAINERS = frozenset({"dict", "list", "tuple", "deque", "OrderedDict", "defaultdict"})
_FILLS = frozenset({"append", "extend", "insert", "setdefault", "update"})


class _Value:
    """What a function of a class assigns to an attribute, or puts into it."""

    def __init__(self, value: ast.expr, function: ast.FunctionDef) -> None:
        called = {name_of(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
        self.is_blank = _is_blank(value)
        if function.name in _BEFORE_CALLS:
            self.is_made_on_host = bool(called - _CONTAINERS) and not _names_device(value)
        else:
            is_moved = function.name in _MOVES or _names_device(function)
            self.is_made_on_host = bool(called & _FACTORIES) and not is_moved


def _is_blank(value: ast.expr) -> bool:
    """Whether it is None or an empty container."""
    if isinstance(value, ast.Call):
        return name_of(value.func) in _CONTAINERS and not value.args and not value.keywords
    parts = getattr(value, "elts", getattr(value, "keys", None))
    return parts == [] or (isinstance(value, ast.Constant) and value.value is None)


def _names_device(tree: ast.AST) -> bool:
    words = {name_of(node) for node in ast.walk(tree)}
    words |= {node.arg or "device" for node in ast.walk(tree) if isinstance(node, ast.keyword | ast.arg)}
    return bool(words & _DEVICE_WORDS) or any(word.endswith(("_like", "kwargs")) for word in words)


@functools.lru_cache(maxsize=256)
def _sites(kind: type) -> dict[str, Site]:
    file, first, tree = _class_tree(kind)
    assigned = [(name, node.lineno, function.name) for name, node, function in _assigned(tree)]
    return {
        name: Site(file=file, line=first + line - 1, function=function)
        for name, line, function in assigned
        if function not in _BEFORE_CALLS
    }


@functools.lru_cache(maxsize=256)
def _values(kind: type) -> tuple[tuple[str, _Value], ...]:
    tree = _class_tree(kind)[2]
    assigned = [(name, node.value, function) for name, node, function in _assigned(tree) if node.value]
    return tuple((name, _Value(value, function)) for name, value, function in [*assigned, *_filled(tree)])


def _class_tree(kind: type) -> tuple[str, int, ast.AST]:
    """The file, the first line and the syntax of a class. Without any where its source is not there."""
    nothing = "", 0, ast.Module(body=[], type_ignores=[])
    try:
        file, (lines, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
        if file is None or origin_of(file) == "machinery":
            return nothing
        linecache.checkcache(file)
        return file, first, ast.parse(inspect.cleandoc("\n" + "".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made at run time, built in, or edited after the import
        return nothing


def _assigned(tree: ast.AST) -> Iterator[tuple[str, Any, ast.FunctionDef]]:
    for node, function in _of_functions(tree):
        yield from ((name, node, function) for name in _targets(node))


def _filled(tree: ast.AST) -> Iterator[tuple[str, ast.expr, ast.FunctionDef]]:
    """``masks`` and the value for ``self.masks.append(...)``, ``self.masks.update(name=...)``."""
    for node, function in _of_functions(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in _FILLS and isinstance(called.value, ast.Attribute):
            put = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield called.value.attr, ast.Tuple(elts=put, ctx=ast.Load()), function


def _of_functions(tree: ast.AST) -> Iterator[tuple[Any, ast.FunctionDef]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from ((node, function) for node in ast.walk(function))


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


def names_host(frame: FrameType | None, called: str) -> bool:
    """Whether the frame is at a call of ``called`` whose source text names the CPU as the device."""
    # Most frames have no such constant, and the search below is slow.
    if frame is None or not any(is_host(constant) for constant in frame.f_code.co_consts):
        return False
    code = frame.f_code
    calls = [call for call in _calls(code.co_filename) if covers(call, frame.f_lineno)]
    place = place_of_call(code, frame.f_lasti)
    # Python before 3.11 gives no columns. Then look at every call of the line.
    calls = [call for call in calls if (call.lineno, call.col_offset, call.end_col_offset) == place] or calls
    return any(name_of(call.func) == called and any(map(names_host_device, _devices(call, called))) for call in calls)


def place_of_call(code: CodeType, instruction: int) -> tuple[int | None, int | None, int | None] | None:
    """The line, the first and the last column of the call at an instruction. None before Python 3.11."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return None
    line, _, column, end_column = next(itertools.islice(positions(), instruction // 2, None))
    return line, column, end_column


def is_host(device: object) -> bool:
    """Whether a device, or its name, is the CPU."""
    return isinstance(device, str | torch.device) and str(device).partition(":")[0] == "cpu"


def gpu_branches(site: Site) -> tuple[int, ...]:
    """The lines in the function of ``site`` that branch on a comparison of a device type with ``"cuda"``."""
    around = [branches for branches in _gpu_branches(site.file) if branches[0] <= site.line <= branches[1]]
    return max(around, default=(0, 0, ()))[2]


def branches_on_cuda(code: CodeType, line: int) -> bool:
    """Whether a branch on this line reads ``is_cuda``."""
    return any(first <= line <= last for first, last in _branches_on_is_cuda(code.co_filename))


def _devices(call: ast.Call, called: str) -> list[ast.expr]:
    positional = call.args[:1] if called == "to" else []
    return [*positional, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]


def names_host_device(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and name_of(value.func) == "device" and value.args:
        value = value.args[0]
    return isinstance(value, ast.Constant) and is_host(value.value)


# These two keep a few numbers for each file of a model, and not its tree: a large model has hundreds of files.
@functools.cache
def _branches_on_is_cuda(file: str) -> tuple[tuple[int, int], ...]:
    """The first and the last line of each test of a branch that reads ``is_cuda``."""
    if not any("is_cuda" in text for text in linecache.getlines(file)):
        return ()
    asking = [test for test in tests_of(tree_of(file)) if any(name_of(part) == "is_cuda" for part in ast.walk(test))]
    return tuple((test.lineno, test.end_lineno or test.lineno) for test in asking)


@functools.cache
def _gpu_branches(file: str) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """For each function its first line, its last line, and the lines of its branches on CUDA."""
    if not any('"cuda"' in text or "'cuda'" in text for text in linecache.getlines(file)):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree_of(file)) if isinstance(node, kinds)]
    return tuple((node.lineno, node.end_lineno or node.lineno, _lines_asking(node)) for node in functions)


def _lines_asking(tree: ast.AST) -> tuple[int, ...]:
    return tuple(sorted({test.lineno for test in tests_of(tree) if any(map(_asks_for_cuda, ast.walk(test)))}))


def tests_of(tree: ast.AST) -> list[ast.expr]:
    """The conditions of its branches."""
    return [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While)]


def _asks_for_cuda(node: ast.AST) -> bool:
    """Whether the node is ``device.type == "cuda"``."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return False
    sides = (node.left, node.comparators[0])
    is_word = any(isinstance(side, ast.Constant) and side.value == "cuda" for side in sides)
    return is_word and any(name_of(side) == "type" for side in sides)


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def covers(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


@functools.lru_cache(maxsize=64)
def _calls(file: str) -> tuple[ast.Call, ...]:
    return tuple(node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))


@functools.lru_cache(maxsize=16)
def tree_of(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # a file edited while it runs, or a notebook cell with magic
        return ast.Module(body=[], type_ignores=[])


def running_call(frame: FrameType, names: frozenset[str]) -> ast.Call | None:
    """The call of one of these names that a frame is at. None for another call, or if several may be meant."""
    return _call_at(frame.f_code, frame.f_lasti, frame.f_lineno, names)


# Cached: a layer runs the same line in every call.
@functools.lru_cache(maxsize=1024)
def _call_at(code: CodeType, instruction: int, line: int, names: frozenset[str]) -> ast.Call | None:
    calls = [call for call in _calls_in(code) if name_of(call.func) in names and covers(call, line)]
    place = place_of_call(code, instruction)
    if place is None:  # Python before 3.11 gives no columns
        return calls[0] if len(calls) == 1 else None
    return next((call for call in calls if (call.lineno, call.col_offset, call.end_col_offset) == place), None)


@functools.lru_cache(maxsize=256)
def _calls_in(code: CodeType) -> tuple[ast.Call, ...]:
    return tuple(node for node in ast.walk(function_of(code)) if isinstance(node, ast.Call))


def function_of(code: CodeType) -> ast.AST:
    """The syntax of one function with the lines and columns of its file, which is faster than that of the file.

    The syntax of the whole file for a lambda.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    # In an ``if`` the function may be indented.
    above = ["if True:\n"] if lines and lines[0][:1].isspace() else []
    try:
        tree = ast.parse("".join([*above, *inspect.getblock(lines)]))
    except (SyntaxError, IndexError):  # a lambda, or code without a file
        return tree_of(code.co_filename)
    return ast.increment_lineno(tree, code.co_firstlineno - 1 - len(above))

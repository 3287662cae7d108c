"""The figures of the source and their limits: size, circles of imports, names that stand twice. It imports nothing.

``python .ci/house_figures.py`` prints them, and exits 1 where one is above its limit. Lower a limit with its figure.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytest_cudagraph"
FEATURES = ("base_revision", "decoding", "serving", "own_graphs", "training")
"""Folders that the core does not import."""

LONG_FUNCTION, LONG_MODULE, SHORT_MODULE, LONG_TEST_FILE = 40, 300, 60, 500
SHOWN = 5

LIMITS = {
    "lines of src": 41_000,
    "modules of src": 254,
    "lines of the core": 28_450,
    "modules of the core": 175,
    "lines of tests": 49_000,
    "circles of imports": 0,
    "class names twice": 0,
    "public names": 90,
    f"functions over {LONG_FUNCTION} lines": 8,
    f"modules over {LONG_MODULE} lines": 8,
    f"modules below {SHORT_MODULE} lines": 12,
    f"test files over {LONG_TEST_FILE} lines": 14,
}


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, its number of lines and its syntax tree."""

    name: str
    lines: int
    tree: ast.Module
    is_package: bool

    @property
    def is_core(self) -> bool:
        return self.name.removeprefix(f"{PACKAGE}.").partition(".")[0] not in FEATURES


def main() -> int:
    figures = figures_of(ROOT)
    too_large = [name for name, items in figures.items() if _count(items) > LIMITS[name]]
    for name, items in figures.items():
        mark = "  ABOVE THE LIMIT" if name in too_large else ""
        print(f"{name:28} {_count(items):7,}  of at most {LIMITS[name]:7,}{mark}")
        if isinstance(items, list) and name != "public names":
            for line in items if name in too_large else items[:SHOWN]:
                print(f"    {line}")
    return int(bool(too_large))


def _count(items: int | list[str]) -> int:
    return items if isinstance(items, int) else len(items)


def figures_of(root: Path) -> dict[str, int | list[str]]:
    """Each figure: a number, or the list of what is counted."""
    source = root / "src"
    modules = [_read(path, source) for path in sorted((source / PACKAGE).rglob("*.py"))]
    tests = [_read(path, root) for path in sorted((root / "tests").rglob("*.py"))]
    core = [module for module in modules if module.is_core]
    files = [module for module in modules if not module.is_package]
    return {
        "lines of src": sum(module.lines for module in modules),
        "modules of src": len(modules),
        "lines of the core": sum(module.lines for module in core),
        "modules of the core": len(core),
        "lines of tests": sum(module.lines for module in tests),
        "circles of imports": [" <-> ".join(circle) for circle in circles(imports_of(modules))],
        "class names twice": class_names_twice(modules),
        "public names": _public_names(modules),
        f"functions over {LONG_FUNCTION} lines": _long_functions(modules),
        f"modules over {LONG_MODULE} lines": _by_lines(files, LONG_MODULE + 1, sys.maxsize),
        f"modules below {SHORT_MODULE} lines": _by_lines(files, 0, SHORT_MODULE - 1),
        f"test files over {LONG_TEST_FILE} lines": _by_lines(tests, LONG_TEST_FILE + 1, sys.maxsize),
    }


def _read(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, len(text.splitlines()), ast.parse(text), is_package)


def imports_of(modules: list[Module]) -> dict[str, set[str]]:
    """The modules of the package that each module imports, in functions and for types too."""
    names = {module.name for module in modules}
    return {module.name: set(_imported(module, names)) - {module.name} for module in modules}


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                # A name of a package is a module of it, or stands in its __init__.
                yield from {inner, node.module} & names if inner not in names else {inner}


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (strongly connected components)."""
    reached = {name: _reach(name, imports) for name in imports}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def _reach(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = list(imports[name])
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached.add(module)
            ahead.extend(imports[module])
    return reached


def class_names_twice(modules: list[Module]) -> list[str]:
    """Names of classes at the top of two modules, private ones too."""
    counts = Counter(node.name for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def _public_names(modules: list[Module]) -> list[str]:
    (package,) = (module for module in modules if module.name == PACKAGE)
    for node in package.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return sorted(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    raise SystemExit(f"{PACKAGE}/__init__.py has no literal __all__: its public names cannot be counted")


def _long_functions(modules: list[Module]) -> list[str]:
    functions = (
        (node.end_lineno - node.lineno + 1, f"{module.name}:{node.lineno} {node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    return [f"{lines} {place}" for lines, place in sorted(functions, reverse=True) if lines > LONG_FUNCTION]


def _by_lines(modules: list[Module], least: int, most: int) -> list[str]:
    chosen = [module for module in modules if least <= module.lines <= most]
    return [f"{module.lines} {module.name}" for module in sorted(chosen, key=lambda module: -module.lines)]


if __name__ == "__main__":
    sys.exit(main())

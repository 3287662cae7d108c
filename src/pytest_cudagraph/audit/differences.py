"""Two calls of one model, compared: what a graph would have frozen, as findings without a catalogue text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cudagraph.audit.trace import Operation, Trace
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The hazard a difference shows, the line it shows at, and both sides of it."""

    id: str
    site: Site | None
    evidence: str
    called_from: Site | None = None


def differences(first: Trace, second: Trace) -> tuple[Difference, ...]:
    """Where two calls part: other operations, other numbers, other shapes, other outside memory.

    What follows the first other operation or the first other shape is a consequence and stays unsaid.
    """
    return tuple(_walk(first, second))


def _walk(first: Trace, second: Trace) -> Iterator[Difference]:
    ones, others = first.operations, second.operations
    for one, other in zip(ones, others, strict=False):
        if one.name != other.name:
            yield _forked(one, other)
            return
        yield from _at(one, other, first.known)
        if one.shapes != other.shapes:
            return
    if len(ones) != len(others):
        longer = ones if len(ones) > len(others) else others
        surplus = longer[min(len(ones), len(others))]
        counts = f"{plural(len(ones), 'operation')}, then {len(others)}"
        yield _at_line("control-flow", surplus, f"{counts}: {surplus.name} runs in one call only")


def _forked(one: Operation, other: Operation) -> Difference:
    # The operation that was captured stands where the branch was taken.
    where = f" (line {one.site.line}, then line {other.site.line})" if one.site and other.site else ""
    return _at_line("control-flow", one, f"{one.name}, then {other.name}{where}")


def _at(one: Operation, other: Operation, known: frozenset[int]) -> Iterator[Difference]:
    moved = tuple(_moved(one, other, known))
    changed = _changed_scalar(one, other)
    yield from moved
    if changed is not None:
        yield _at_line("baked-scalar", other, f"{one.name}: {changed}")
    elif one.shapes != other.shapes and not moved:  # another tensor may well be larger: a cache that grows
        shapes = f"{_shapes_text(one)}, then {_shapes_text(other)}"
        yield _at_line("dynamic-shape", other, f"{one.name} gives {shapes}")


def _at_line(hazard: str, operation: Operation, evidence: str) -> Difference:
    return Difference(id=hazard, site=operation.site, called_from=operation.called_from, evidence=evidence)


def _changed_scalar(one: Operation, other: Operation) -> str | None:
    if len(one.scalars) != len(other.scalars):
        return f"{plural(len(one.scalars), 'plain argument')}, then {len(other.scalars)}"
    for before, after in zip(one.scalars, other.scalars, strict=True):
        if before != after:
            return f"{before}, then {after}"
    return None


def _moved(one: Operation, other: Operation, known: frozenset[int]) -> Iterator[Difference]:
    before = {outside.storage: outside.name for outside in one.reads if outside.origin != "input"}
    for outside in other.reads:
        if outside.origin == "input" or outside.storage in before:
            continue
        if outside.storage in known and outside.name not in before.values():
            # Another piece of the same state: not moved, chosen.
            names = f"{', '.join(before.values()) or 'nothing'}, then {outside.name}"
            yield _at_line("control-flow", other, f"{one.name} reads {names}")
            return
        hazard = "rebinds-state" if outside.origin == "state" else "foreign-tensor"
        yield _at_line(hazard, other, f"{one.name} reads {outside.name} at another address")


def _shapes_text(operation: Operation) -> str:
    return ", ".join(str(shape) for shape in operation.shapes)

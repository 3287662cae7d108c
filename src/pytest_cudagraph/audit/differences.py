"""Two calls of one model, compared: what a graph would have frozen, as findings without a catalogue text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cudagraph.audit.trace import Operation, Outside, Trace
from pytest_cudagraph.values import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The hazard a difference shows, the line it shows at, and both sides of it."""

    id: str
    site: Site | None
    evidence: str


def differences(first: Trace, second: Trace) -> tuple[Difference, ...]:
    """Where two calls part: other operations, other numbers, other shapes, other outside memory.

    What follows the first other operation or the first other shape is a consequence and stays unsaid.
    """
    return tuple(_walk(first.operations, second.operations))


def _walk(first: list[Operation], second: list[Operation]) -> Iterator[Difference]:
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            yield _forked(one, other)
            return
        yield from _at(one, other)
        if one.shapes != other.shapes:
            return
    if len(first) != len(second):
        longer = first if len(first) > len(second) else second
        surplus = longer[min(len(first), len(second))]
        counts = f"{len(first)} operations, then {len(second)}"
        yield Difference(
            id="control-flow", site=surplus.site, evidence=f"{counts}: {surplus.name} runs in one call only"
        )


def _forked(one: Operation, other: Operation) -> Difference:
    # The operation that was captured stands where the branch was taken.
    where = f" (line {one.site.line}, then line {other.site.line})" if one.site and other.site else ""
    return Difference(id="control-flow", site=one.site, evidence=f"{one.name}, then {other.name}{where}")


def _at(one: Operation, other: Operation) -> Iterator[Difference]:
    moved = tuple(_moved(one, other))
    changed = _changed_scalar(one, other)
    yield from moved
    if changed is not None:
        yield Difference(id="baked-scalar", site=other.site, evidence=f"{one.name}: {changed}")
    elif one.shapes != other.shapes and not moved:  # another tensor may well be larger: a cache that grows
        shapes = f"{_shapes_text(one)}, then {_shapes_text(other)}"
        yield Difference(id="dynamic-shape", site=other.site, evidence=f"{one.name} gives {shapes}")


def _changed_scalar(one: Operation, other: Operation) -> str | None:
    if len(one.scalars) != len(other.scalars):
        return f"{len(one.scalars)} plain arguments, then {len(other.scalars)}"
    for before, after in zip(one.scalars, other.scalars, strict=True):
        if before != after:
            return f"{before}, then {after}"
    return None


def _moved(one: Operation, other: Operation) -> Iterator[Difference]:
    before = {outside.storage for outside in one.reads if outside.origin != "input"}
    for outside in other.reads:
        if outside.origin != "input" and outside.storage not in before:
            yield Difference(
                id=_kind(outside), site=other.site, evidence=f"{one.name} reads {outside.name} at another address"
            )


def _kind(outside: Outside) -> str:
    return "rebinds-state" if outside.origin == "state" else "foreign-tensor"


def _shapes_text(operation: Operation) -> str:
    return ", ".join(str(shape) for shape in operation.shapes)

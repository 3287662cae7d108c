"""Make findings from the results of the calls: one per hazard and line, errors first."""

from __future__ import annotations

import linecache
import operator
import re
from collections.abc import Iterator
from dataclasses import replace

from pytest_cudagraph.audit.rule_checks import CHECKED_ON_A_CPU, NUMBER_TAKERS
from pytest_cudagraph.audit.trace import TORCHS, ProbeResults, Trace, differences
from pytest_cudagraph.hazards import CATALOGUE, HIDDEN_WRITE_TEXT, RawFinding
from pytest_cudagraph.units import first_of
from pytest_cudagraph.values import Finding, Site

_LOUD_CAUSES = frozenset({"host-sync", "dynamic-shape", "host-data"})

_WARNED = {
    "control-flow": (
        "a branch depends on a Python value that moves with each call, but a replay takes the branch of the capture",
        "compute both branches and decide with torch.where, or capture one graph per branch. None needed for a branch "
        "that computes nothing, such as a log",
    ),
    "host-data": (
        "the model holds a tensor that does not move with it to the device",
        "register_buffer in __init__, in place of the plain attribute. None needed if the model is built on the device",
    ),
    "baked-scalar": (
        "the call reads the date, but a replay keeps the date of the capture",
        "pass it to the model as a tensor. None needed if no result depends on it",
    ),
}
"""What a warning says of each hazard, and its fix: equal calls gave equal results."""

_DRAWN = "draws from the default generator, as replays do"
_POSITION_FIX = (
    "keep positions in a tensor on the device, change it in place, and write with index_copy_; read the full length "
    "with a mask. A slice needs its number on the host"
)
_POSITIONS = re.compile(r"aten\.(slice|select|narrow)\b")

_DRAWS_FIX = "none needed. If you want no random numbers, call eval()"


_ENDING = frozenset({"collective", "nested-graph"})
"""What makes further calls pointless: other processes may have ended, and a graph is no eager model."""


def findings_of(seen: ProbeResults) -> tuple[Finding, ...]:
    """Every finding of an audit."""
    if ends_audit(seen):
        return _folded([raw for raw in seen.refused if raw.id in _ENDING])
    repeated = [found.seen_in("two calls on the same inputs") for found in seen.repeated]
    raw = [*seen.refused, *_refused_elsewhere(seen), *repeated, *_on_other_inputs(seen)]
    raw += _rebound(seen, raw)
    raw += [] if repeated else _at_first_call(seen)
    raw += _written_by_the_host(seen)
    raw += _notes(seen, raw)
    return _folded(raw)


def ends_audit(seen: ProbeResults) -> bool:
    """Whether the first call shows what makes further calls pointless."""
    return any(raw.id in _ENDING for raw in seen.refused)


def is_explained(seen: ProbeResults) -> bool:
    """Whether the findings so far explain what calls on other inputs would show.

    A call depends on the values of its inputs only if the host reads them. A known read is the finding.
    """
    return bool(seen.repeated) or any(raw.level == "error" and raw.id in _LOUD_CAUSES for raw in seen.refused)


def refused_in(first: Trace, parts: Trace | None) -> tuple[RawFinding, ...]:
    """The findings of the rules in a call with whole composite operations, and in one with their parts.

    They are in the order of the call, because the first refusal may cause the others.
    """
    whole = _refusals(first)
    # If the rules allow the whole operation, reads of its parts at that line are legal.
    legal = {op.site for op in first.operations if op.name.startswith(CHECKED_ON_A_CPU) and op.refused is None}
    known = {(raw.id, raw.level, raw.site) for _, raw in whole}
    places: dict[Site | None, int] = {}
    for place, op in enumerate(first.operations):
        places.setdefault(op.site, place)
    in_parts = [
        (places.get(raw.site, len(first.operations)), raw)
        for _, raw in (_refusals(parts) if parts else [])
        if (raw.id, raw.level, raw.site) not in known and not (raw.site in legal and raw.id == "host-sync")
    ]
    placed = sorted([*whole, *in_parts, *first.host_calls], key=operator.itemgetter(0))
    return tuple(raw for _, raw in placed)


def _refusals(trace: Trace) -> list[tuple[int, RawFinding]]:
    """The findings of the rules, each with the number of operations before it."""
    takers = {op.site for op in trace.operations if op.name.startswith(NUMBER_TAKERS)}
    refused = [(place, op.refused) for place, op in enumerate(trace.operations) if op.refused is not None]
    # torch makes a tensor from the number in ``x[mask] = 0.0``. That is legal and worth no note.
    return [
        (at, raw) for at, raw in refused if not (raw.id == "host-data" and raw.level == "note" and raw.site in takers)
    ]


def _refused_elsewhere(seen: ProbeResults) -> Iterator[RawFinding]:
    """The refusals at another batch size or on a GPU that the first call does not have."""
    known = {(raw.id, raw.site) for raw in seen.refused}
    for where, trace in seen.elsewhere.items():
        for raw in (*(raw for _, raw in _refusals(trace)), *(raw for _, raw in trace.host_calls)):
            if raw.level == "error" and (raw.id, raw.site) not in known:
                yield raw.seen_in(where)


def _at_first_call(seen: ProbeResults) -> list[RawFinding]:
    # The first call may fill a cache: the capture follows warm-up calls and records what later calls do.
    if seen.second is None or seen.second is seen.first:
        return []
    found = differences(seen.first, seen.second)
    return [replace(raw.seen_in("the first call and later ones"), level="note") for raw in found]


def _on_other_inputs(seen: ProbeResults) -> list[RawFinding]:
    for name, other in seen.others.items():
        # These calls begin from the state of the first call. If that call filled a cache, compare with the third.
        found = differences(seen.first, other)
        if found and (seen.third is None or differences(seen.third, other)):
            return [raw.seen_in(f"calls on {name} inputs") for raw in found]
    return []


def _rebound(seen: ProbeResults, raw: list[RawFinding]) -> Iterator[RawFinding]:
    names = [name for name in seen.changes.rebound if name in seen.registered]
    if names and not _has(raw, "rebinds-state"):
        text = f"{first_of(names, 3)} at another address"
        maker = seen.first.makers.get(names[0])
        yield maker.finding("rebinds-state", text) if maker else RawFinding(id="rebinds-state", text=text)


def _written_by_the_host(seen: ProbeResults) -> Iterator[RawFinding]:
    trace = seen.first
    written = {outside.storage for operation in trace.operations for outside in operation.writes}
    names = [name for name in seen.changes.written if seen.storages.get(name) not in written]
    # Custom operators and tensor subclasses may write without a mark in the schema. A replay repeats such a write.
    is_opaque = bool(trace.subclasses) or any(op.refused and op.refused.id == "unknown-op" for op in trace.operations)
    if names and not is_opaque:
        text = HIDDEN_WRITE_TEXT.format(name=first_of(names, 3))
        memory = {seen.storages.get(name) for name in names}
        reads = (op for op in trace.operations if any(outside.storage in memory for outside in op.reads))
        reader = next(reads, None)
        yield reader.finding("hidden-write", text) if reader else RawFinding(id="hidden-write", text=text)


def _notes(seen: ProbeResults, raw: list[RawFinding]) -> Iterator[RawFinding]:
    yield from _writes(seen)
    for name, outside in seen.first.aliases:
        owner = f"{'input ' if outside.origin == 'input' else ''}{outside.name}"
        yield RawFinding(id="output-alias", level="note", text=f"{name} lies in the memory of {owner}")
    if not _has(raw, "rng"):
        yield from _draws(seen)
        yield from _hidden_draws(seen, raw)
    if not _has(raw, "control-flow", "baked-scalar"):
        yield from seen.warnings
        yield from _python_changes(seen)
    yield from _foreign_reads(seen, raw)


def _draws(seen: ProbeResults) -> Iterator[RawFinding]:
    for op in seen.first.operations:
        if op.draws:
            yield op.finding("rng", f"{op.name} {_DRAWN}", "note")


def _hidden_draws(seen: ProbeResults, raw: list[RawFinding]) -> Iterator[RawFinding]:
    """Generators that moved, although no operation and no difference shows what for."""
    is_frozen = any(each.level == "error" for each in raw if each.id in ("control-flow", "baked-scalar"))
    for name in seen.generators:
        if name == TORCHS and not any(op.draws for op in seen.first.operations):
            yield RawFinding(id="rng", level="note", text=f"{name} moves, but no operation says that it draws")
        elif name != TORCHS and not is_frozen:
            yield RawFinding(id="rng", level="note", text=f"{name} moves, but a replay draws nothing from it")


def _writes(seen: ProbeResults) -> Iterator[RawFinding]:
    for op in seen.first.operations:
        for outside in op.writes:
            if outside.origin == "input":
                text = f"{op.name} writes {outside.name}, but a replay writes a copy and not the caller's tensor"
                yield op.finding("mutates-input", text, "note")
            else:
                yield op.finding("mutates-state", f"{op.name} writes {outside.name}, and so does a replay", "note")
    for change, maker in seen.first.containers:
        text = f"{change}, but a replay runs no Python and does not change the caller's object"
        raw = RawFinding(id="mutates-input", level="note", text=text)
        yield replace(raw, site=maker.site, called_from=maker.called_from) if maker else raw


def _python_changes(seen: ProbeResults) -> Iterator[RawFinding]:
    changes = seen.changes
    tensors = [f"{name}: another tensor" for name in changes.rebound if name not in seen.registered]
    tensors += [f"{name}: a new tensor" for name in changes.added] + [f"{name}: gone" for name in changes.removed]
    found = [*changes.python, *tensors, *(f"training of {flag}" for flag in changes.training)]
    if found:
        yield RawFinding(id="stateful-python", level="note", text=first_of(found, 3))


def _foreign_reads(seen: ProbeResults, raw: list[RawFinding]) -> Iterator[RawFinding]:
    moved = {each.site for each in raw if each.id == "foreign-tensor"}
    for op in (seen.third or seen.first).operations:
        for outside in op.reads:
            if outside.origin == "foreign" and op.site not in moved:
                text = f"{op.name} reads {outside.name}, at the same address in every call"
                yield op.finding("foreign-tensor", text, "note")


def _has(raw: list[RawFinding], *ids: str) -> bool:
    return any(each.id in ids for each in raw)


def _folded(raw: list[RawFinding]) -> tuple[Finding, ...]:
    groups: dict[tuple[str, Site | None], list[RawFinding]] = {}
    wrong = {each.site for each in raw if each.level == "error"}
    levels = ("error", "warning", "note")
    for each in sorted(raw, key=lambda each: levels.index(each.level)):  # else in the order of discovery
        if not (each.level == "note" and each.id == "host-data" and each.site in wrong):
            groups.setdefault((each.id, each.site), []).append(each)
    return tuple(_finding(group) for group in groups.values())


def _finding(group: list[RawFinding]) -> Finding:
    first = group[0]
    hazard = CATALOGUE[first.id]
    message, fix = _WARNED[first.id] if first.level == "warning" else (hazard.what, hazard.fix)
    if first.id == "baked-scalar" and _POSITIONS.search(first.evidence):
        fix = _POSITION_FIX
    is_legal_draw = first.text.endswith(_DRAWN)
    count = sum(raw.evidence == first.evidence for raw in group)
    times = f" ({count} times)" if count > 1 else ""
    code = linecache.getline(first.site.file, first.site.line).strip() if first.site else ""
    return Finding(
        id=first.id,
        level=first.level,
        message=f"random numbers: the call {_DRAWN}" if is_legal_draw else message,
        fix=_DRAWS_FIX if is_legal_draw else fix,
        evidence=f"{f'`{code}`: ' if code else ''}{first.evidence}{times}",
        site=first.site,
        called_from=first.called_from,
        loud=hazard.loud and first.level == "error",
    )

"""From what the calls showed to findings: one per hazard and line, errors first, the cause before its effects."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_cudagraph.audit.probes import ProbeResults
from pytest_cudagraph.audit.trace import TORCHS, Trace, TraceDifference, TracedOperation, differences
from pytest_cudagraph.hazards import CATALOGUE
from pytest_cudagraph.values import Finding, Level, Site

_NUMBER_TAKERS = ("aten.index_put_", "aten.masked_fill", "aten.fill_")
_LOUD_CAUSES = frozenset({"host-sync", "dynamic-shape", "host-data"})

_DRAWN = "draws from the default generator, as replays do"
_DRAWS_FIX = "none needed; if no random numbers are meant: eval()"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFinding:
    """One sign of a hazard, before signs of the same hazard at the same line become one finding."""

    id: str
    level: Level
    evidence: str
    site: Site | None
    called_from: Site | None = None
    is_legal: bool = False
    """Whether it is drawing as replays draw too: the same subject, and no hazard."""


def findings_of(seen: ProbeResults) -> tuple[Finding, ...]:
    """Every finding of a rehearsal."""
    repeated = [_difference_sign(difference, "two calls on the same inputs") for difference in seen.repeated]
    signs = [*_refused(seen), *_beside(seen), *_sighted(seen), *repeated, *_on_other_inputs(seen)]
    signs += _rebound(seen, signs)
    signs += [] if repeated else _at_first_call(seen)
    signs += _written_by_the_host(seen)
    signs += _notes(seen, signs)
    return _folded(signs)


def is_explained(seen: ProbeResults) -> bool:
    """Whether what calls on other inputs would show has its cause among what is known already.

    What depends on the inputs' values was read by the host: where the read is known it is the finding.
    """
    loud = (*_refused(seen), *_sighted(seen))
    return bool(seen.repeated) or any(sign.level == "error" and sign.id in _LOUD_CAUSES for sign in loud)


def _refused(seen: ProbeResults) -> Iterator[RawFinding]:
    whole = _refusals(seen.first)
    # The CPU checks the range of one_hot's input by reading it, CUDA does not: with a number of classes the whole
    # form is legal, and reads of its parts at that line say nothing.
    legal = {op.site for op in seen.first.operations if op.name.startswith("aten.one_hot") and op.refused is None}
    # Both forms of one operation are one sign: the parts count only where the whole said nothing.
    told = {(sign.id, sign.level, sign.site) for sign in whole}
    yield from whole
    for sign in _refusals(seen.parts):
        is_range_check = sign.site in legal and "_local_scalar_dense" in sign.evidence
        if not is_range_check and (sign.id, sign.level, sign.site) not in told:
            yield sign


def _refusals(trace: Trace | None) -> list[RawFinding]:
    if trace is None:
        return []
    takers = {op.site for op in trace.operations if op.name.startswith(_NUMBER_TAKERS)}
    return [sign for op in trace.operations for sign in _refusal_signs(op, is_taken=op.site in takers)]


def _refusal_signs(operation: TracedOperation, *, is_taken: bool) -> Iterator[RawFinding]:
    """At most one. The number in ``x[mask] = 0.0`` or ``x[0] = 0.0`` is first made into a tensor: nothing to tell."""
    refused = operation.refused
    is_number = refused is not None and (refused.id, refused.level) == ("host-data", "note")
    if refused is not None and not (is_number and is_taken):
        evidence = f"{refused.operation}: {refused.text}"
        yield RawFinding(
            id=refused.id,
            level=refused.level,
            evidence=evidence,
            site=operation.site,
            called_from=operation.called_from,
        )


def _beside(seen: ProbeResults) -> Iterator[RawFinding]:
    """What is refused at another batch size, or on a GPU, and was not refused in the first call."""
    told = {(sign.id, sign.site) for sign in _refused(seen)}
    for where, trace in seen.beside.items():
        for sign in _refusals(trace):
            if sign.level == "error" and (sign.id, sign.site) not in told:
                yield replace(sign, evidence=f"{where}: {sign.evidence}")


def _sighted(seen: ProbeResults) -> Iterator[RawFinding]:
    for sighting in seen.host_calls:
        evidence = f"{sighting.operation}: {sighting.text}"
        yield RawFinding(
            id=sighting.id,
            level=sighting.level,
            evidence=evidence,
            site=sighting.site,
            called_from=sighting.called_from,
        )


def _at_first_call(seen: ProbeResults) -> list[RawFinding]:
    # A cache filled by the first call is legal: capture follows warm-up calls and records what later calls do.
    if seen.second is None or seen.second is seen.first:
        return []
    signs = [_difference_sign(found, "the first call and later ones") for found in differences(seen.first, seen.second)]
    return [replace(sign, level="note") for sign in signs]


def _on_other_inputs(seen: ProbeResults) -> list[RawFinding]:
    for name, other in seen.others.items():
        # The other inputs meet the state of the first call; a cache filled by then makes the third the one to compare.
        found = differences(seen.first, other)
        if found and (seen.third is None or differences(seen.third, other)):
            return [_difference_sign(difference, f"calls on {name} inputs") for difference in found]
    return []


def _difference_sign(difference: TraceDifference, when: str) -> RawFinding:
    evidence = f"{when}: {difference.evidence}"
    return RawFinding(
        id=difference.id, level="error", evidence=evidence, site=difference.site, called_from=difference.called_from
    )


def _rebound(seen: ProbeResults, signs: list[RawFinding]) -> Iterator[RawFinding]:
    names = [name for name in seen.changes.rebound if name in seen.registered]
    sited = any(sign.id == "rebinds-state" for sign in signs)
    if names and not sited:
        yield RawFinding(id="rebinds-state", level="error", evidence=f"{_listed(names)} at another address", site=None)


def _written_by_the_host(seen: ProbeResults) -> Iterator[RawFinding]:
    trace = seen.first
    written = {outside.storage for operation in trace.operations for outside in operation.writes}
    names = [name for name in seen.changes.written if seen.storages.get(name) not in written]
    # What is opaque may write without saying so; a replay runs it and writes too.
    is_opaque = bool(trace.subclasses) or any(op.refused and op.refused.id == "unknown-op" for op in trace.operations)
    if names and not is_opaque:
        evidence = f"{_listed(names)} written by the host, by no operation: a replay does not"
        yield RawFinding(id="mutates-state", level="error", evidence=evidence, site=None)


def _notes(seen: ProbeResults, signs: list[RawFinding]) -> Iterator[RawFinding]:
    yield from _writes(seen)
    for name, outside in seen.first.aliases:
        owner = f"{'input ' if outside.origin == 'input' else ''}{outside.name}"
        yield RawFinding(id="output-alias", level="note", evidence=f"{name} lies in the memory of {owner}", site=None)
    if not any(sign.id == "rng" for sign in signs):
        yield from _draws(seen)
        yield from _drawn_unseen(seen, signs)
    if not any(sign.id in ("control-flow", "baked-scalar") for sign in signs):
        yield from _python_changes(seen)
    yield from _foreign_reads(seen, signs)


def _draws(seen: ProbeResults) -> Iterator[RawFinding]:
    for operation in seen.first.operations:
        if operation.draws:
            yield replace(_note("rng", f"{operation.name} {_DRAWN}", operation), is_legal=True)


def _drawn_unseen(seen: ProbeResults, signs: list[RawFinding]) -> Iterator[RawFinding]:
    """Generators that moved although no operation drew, and nothing showed what for."""
    is_frozen = any(sign.level == "error" and sign.id in ("control-flow", "baked-scalar") for sign in signs)
    for name in seen.generators:
        if name == TORCHS and not any(operation.draws for operation in seen.first.operations):
            yield RawFinding(
                id="rng", level="note", evidence=f"{name} moves; no operation tells that it draws", site=None
            )
        elif name != TORCHS and not is_frozen:
            yield RawFinding(
                id="rng", level="note", evidence=f"{name} moves; a replay draws nothing from it", site=None
            )


def _note(hazard: str, evidence: str, operation: TracedOperation) -> RawFinding:
    return RawFinding(
        id=hazard, level="note", evidence=evidence, site=operation.site, called_from=operation.called_from
    )


def _writes(seen: ProbeResults) -> Iterator[RawFinding]:
    for operation in seen.first.operations:
        for outside in operation.writes:
            if outside.origin == "input":
                evidence = f"{operation.name} writes {outside.name}; replays write a copy, the caller's stays"
                yield _note("mutates-input", evidence, operation)
            else:
                evidence = f"{operation.name} writes {outside.name}; replays do too"
                yield _note("mutates-state", evidence, operation)
    for change, maker in seen.first.containers:
        site, called_from = (maker.site, maker.called_from) if maker else (None, None)
        evidence = f"{change}; a replay runs no Python, the caller's stays"
        yield RawFinding(id="mutates-input", level="note", evidence=evidence, site=site, called_from=called_from)


def _python_changes(seen: ProbeResults) -> Iterator[RawFinding]:
    changes = seen.changes
    tensors = [f"{name}: another tensor" for name in changes.rebound if name not in seen.registered]
    tensors += [f"{name}: a new tensor" for name in changes.added] + [f"{name}: gone" for name in changes.removed]
    found = [*changes.python, *tensors, *(f"training of {flag}" for flag in changes.training)]
    if found:
        yield RawFinding(id="stateful-python", level="note", evidence=_listed(found), site=None)


def _foreign_reads(seen: ProbeResults, signs: list[RawFinding]) -> Iterator[RawFinding]:
    trace = seen.third or seen.first
    moved = {sign.site for sign in signs if sign.id == "foreign-tensor"}
    for operation in trace.operations:
        for outside in operation.reads:
            if outside.origin == "foreign" and operation.site not in moved:
                evidence = f"{operation.name} reads {outside.name}, at the same address in every call"
                yield _note("foreign-tensor", evidence, operation)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _folded(signs: list[RawFinding]) -> tuple[Finding, ...]:
    groups: dict[tuple[str, Site | None], list[RawFinding]] = {}
    wrong = {sign.site for sign in signs if sign.level == "error"}
    signs = [sign for sign in signs if not (sign.level == "note" and sign.id == "host-data" and sign.site in wrong)]
    for sign in sorted(signs, key=lambda sign: sign.level):  # errors first; the order of discovery otherwise
        groups.setdefault((sign.id, sign.site), []).append(sign)
    return tuple(_finding(group) for group in groups.values())


def _finding(group: list[RawFinding]) -> Finding:
    first = group[0]
    hazard = CATALOGUE[first.id]
    count = sum(sign.evidence == first.evidence for sign in group)
    times = f" ({count} times)" if count > 1 else ""
    code = linecache.getline(first.site.file, first.site.line).strip() if first.site else ""
    return Finding(
        id=first.id,
        level=first.level,
        message=f"random numbers: the call {_DRAWN}" if first.is_legal else hazard.what,
        fix=_DRAWS_FIX if first.is_legal else hazard.fix,
        evidence=f"{f'`{code}`: ' if code else ''}{first.evidence}{times}",
        site=first.site,
        called_from=first.called_from,
        loud=hazard.loud and first.level == "error",
    )

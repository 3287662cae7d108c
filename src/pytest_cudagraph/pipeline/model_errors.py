"""Explain a failing model: its traceback if it raised, its lines if a replay differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pytest_cudagraph import hazards, sources, state
from pytest_cudagraph.errors import (
    CaptureFailed,
    CompileFailed,
    CudagraphError,
    EagerFailed,
    GraphTestFailure,
    first_line,
)
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.sources.syntax import assigned_at
from pytest_cudagraph.values import Agreement, Assigned, Disagreement, Judgement, Site, Verdict

_ANY_FIX = (
    "let outputs depend on inputs and on tensors that are changed in place, and on nothing else; "
    "where the difference is rounding: rtol, atol"
)


def fix_for(result: Agreement | Disagreement) -> str:
    """``fix: ...``: the catalogue's remedy for the hazard, or a general one. Empty without a difference."""
    if isinstance(result, Agreement):
        return ""
    return f"fix: {hazards.CATALOGUE[result.finding_id].fix if result.finding_id else _ANY_FIX}"


def places_of(result: Agreement | Disagreement, model: Model) -> tuple[str, ...]:
    """``assigned at model.py:20 in forward: self.cached = ...`` for each attribute that eager assigns."""
    if isinstance(result, Agreement):
        return ()
    return tuple(dict.fromkeys(line for each in result.assigned for line in _place(each, model)))


def _place(assigned: Assigned, model: Model) -> Iterator[str]:
    site = assigned.site or _site(assigned.name, model)
    if site is not None:
        yield f"assigned at {sources.describe(site)}"
    if assigned.called_from is not None:
        yield f"called from {sources.describe(assigned.called_from)}"


def _site(name: str, model: Model) -> Site | None:
    """Of ``layer.cached`` or ``layer.cached[0]``, as the state names it."""
    path, _, attribute = name.partition("[")[0].rpartition(".")
    for module in state.modules_of(model):
        owner = dict(module.named_modules()).get(path)
        site = None if owner is None else assigned_at(type(owner), attribute)
        if site is not None:
            return site
    return None


class _Stage(NamedTuple):
    """The error, gate and verdict of a failed stage, and its description."""

    failure: type[GraphTestFailure]
    gate: str
    verdict: Verdict
    when: str


_STAGES: Mapping[str, _Stage] = {
    "audit": _Stage(EagerFailed, "eager", Verdict.NOT_CAPTURED, "while it was audited"),
    "compile": _Stage(CompileFailed, "compile", Verdict.NOT_CAPTURED, "while it was compiled"),
    "capture": _Stage(CaptureFailed, "capture", Verdict.NOT_CAPTURED, "during warm-up or capture"),
    "check": _Stage(EagerFailed, "eager", Verdict.FAILED, "while its replays were checked"),
    "measure": _Stage(EagerFailed, "eager", Verdict.FAILED, "while it was measured"),
}

_AT_FIRST: tuple[str, Verdict] = ("eager", Verdict.NOT_CAPTURED)
"""For the first eager calls, which come before all stages."""

_OWN_FOLDER = str(Path(__file__).parent.parent)


def failure_in(stage: str, error: Exception) -> tuple[GraphTestFailure, Judgement] | None:
    """The failure for an error that the user's code raised in ``stage``. None for an error of the plugin.

    Raise it ``from`` the error. The error's traceback then begins at the model.
    """
    site = sources.user_site_of(error)
    if site is None or isinstance(error, CudagraphError) or stage not in _STAGES:
        return None
    failure, gate, verdict, when = _STAGES[stage]
    reason = f"the model raised {first_line(error)} {when}"
    evidence = (f"at {sources.describe(site)}", "its first call at each batch size went well")
    error.__traceback__ = _from_the_model(error.__traceback__)
    message = "\n  ".join((reason, *evidence))
    return failure(message), Judgement(gate=gate, verdict=verdict, reason=reason, evidence=evidence)


def judgement_of(stage: str, failure: EagerFailed | CudagraphError) -> Judgement:
    """The judgement for an error that ended a run without a finding: an eager call that raised, or invalid outputs.

    An error without a message is shown by its class.
    """
    reason, *evidence = str(failure).splitlines() or [type(failure).__name__]
    lines = tuple(line.strip() for line in evidence)
    gate, verdict = (_STAGES[stage].gate, _STAGES[stage].verdict) if stage in _STAGES else _AT_FIRST
    return Judgement(gate=gate, verdict=verdict, reason=reason, evidence=lines)


def _from_the_model(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        traceback = traceback.tb_next
    return traceback

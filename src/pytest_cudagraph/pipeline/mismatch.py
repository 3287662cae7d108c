"""What a replay that differs from eager is told with: the line that only eager runs, and what to change."""

from __future__ import annotations

from pytest_cudagraph import hazards, sources, state
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.sources.assignments import assigned_at
from pytest_cudagraph.values import Agreement, Disagreement, Site

_ANY_FIX = (
    "let outputs depend on inputs and on tensors that are changed in place, and on nothing else; "
    "where the difference is rounding: rtol, atol"
)


def fix_for(found: Agreement | Disagreement) -> str:
    """``fix: ...``: the catalogue's remedy for the hazard, or what holds for all of them; empty where all agrees."""
    if isinstance(found, Agreement):
        return ""
    return f"fix: {hazards.CATALOGUE[found.finding_id].fix if found.finding_id else _ANY_FIX}"


def places_of(found: Agreement | Disagreement, model: Model) -> tuple[str, ...]:
    """``assigned at model.py:20 in forward: self.cached = ...`` for what eager assigns, where its class shows it."""
    if isinstance(found, Agreement):
        return ()
    sites = (_site(name, model) for name in found.assigned)
    return tuple(dict.fromkeys(f"assigned at {sources.describe(site)}" for site in sites if site is not None))


def _site(name: str, model: Model) -> Site | None:
    """Of ``layer.cached`` or ``layer.cached[0]``, as the state names it."""
    path, _, attribute = name.partition("[")[0].rpartition(".")
    for module in state.modules_of(model):
        owner = dict(module.named_modules()).get(path)
        site = None if owner is None else assigned_at(type(owner), attribute)
        if site is not None:
            return site
    return None

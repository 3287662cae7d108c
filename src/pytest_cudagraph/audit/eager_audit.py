"""Audit the eager model: find what makes CUDA refuse a capture, and what makes a replay wrong without an error.

The audit does not see streams, other threads, memory pools, compiled code, or the inside of custom operators except for
their reads in Python. On a CPU it sees copies between devices only where the source names the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import state
from pytest_cudagraph.audit.findings import findings_of
from pytest_cudagraph.audit.probes import run_probes
from pytest_cudagraph.audit.trace import ProbeResults
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.hazards import CATALOGUE
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.sources.syntax import gpu_branches
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import AuditRule, Finding


def training_note(model: Model, findings: Iterable[Finding]) -> str:
    """The effect of training mode in this model, in words. Empty if training mode has no effect."""
    modules = [each for outer in state.modules_of(model) for each in outer.modules() if each.training]
    effects = list(dict.fromkeys(effect for module in modules for effect in _effects(module)))
    if modules and not effects and any(finding.id == "rng" for finding in findings):
        effects = ["it draws random numbers"]
    if not effects:
        return ""
    count = plural(len(modules), "module")
    return f"the model is in training mode ({count}): {', '.join(effects)}. If you do not want this, call .eval()"


def _effects(module: nn.Module) -> list[str]:
    name = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return [f"{name} draws random numbers"]
    if isinstance(module, nn.modules.batchnorm._NormBase) and isinstance(module.running_mean, torch.Tensor):
        return [f"{name} updates its statistics"]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The findings in an eager model, errors first, and the parts that the audit cannot judge."""

    findings: tuple[Finding, ...] = ()
    not_judged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks on legal use that is rarely intended."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that prevent a capture or make a replay wrong."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def audit(
    model: Model,
    example: Example,
    backend: Backend,
    another: Example | None = None,
    constants: state.Constants = state.NO_CONSTANTS,
    own_rules: Sequence[AuditRule] = (),
) -> Audit:
    """Call the eager model a dozen times and report its hazards by the ids of the catalogue.

    ``another`` is an example of another batch size. The rules judge its call too. The model, its inputs and all random
    generators stay bit-equal. ``constants`` are parameters that calls do not write, and are not copied. ``own_rules``
    judge custom operators, which the audit cannot look into. The audit skips compiled and scripted models, because they
    do not run the written code. Exceptions of the model's first call propagate.
    """
    for rule in own_rules:
        _check_rule(rule)
    sealed = sorted(set(_sealed_parts(model)))
    if sealed:
        not_judged = tuple(f"{part}. Audit its eager code instead" for part in sealed)
        return Audit(not_judged=not_judged, notes=_notes(model, ()))
    seen = run_probes(model, example, backend, another, constants, {each.operator: each for each in own_rules})
    findings = findings_of(seen)
    not_judged = (*seen.not_judged, *_unseen(seen))
    return Audit(findings=findings, not_judged=not_judged, notes=_notes(model, findings))


def with_accepted(found: Audit, accepted: Mapping[str, str]) -> Audit:
    """The audit with the findings of accepted hazards as notes. ``accepted`` gives the user's reason for each id.

    Raises :class:`~pytest_cudagraph.errors.InputError` for an id that the catalogue does not have.
    """
    _check_ids("accept", accepted)
    findings = tuple(
        replace(each, level="note", accepted=accepted[each.id]) if each.id in accepted else each
        for each in found.findings
    )
    notes = [
        f"accepted: {each.site}: {each.message} [{each.id}]: {each.accepted}" for each in findings if each.accepted
    ]
    notes += [f"accept names {id_}, which was not found" for id_ in accepted if id_ not in {f.id for f in findings}]
    return replace(found, findings=findings, notes=(*found.notes, *notes))


def _check_ids(what: str, ids: Iterable[object]) -> None:
    for id_ in ids:
        if not isinstance(id_, str) or id_ not in CATALOGUE:
            raise InputError(f"{what} takes ids of hazards: {', '.join(CATALOGUE)}; found {value_text(id_)}")


def _check_rule(rule: AuditRule) -> None:
    _check_ids("the hazard of an audit rule", [] if rule.hazard is None else [rule.hazard])
    for name, value in (("operator", rule.operator), ("reason", rule.reason)):
        if not isinstance(value, str):
            raise InputError(f"the {name} of an audit rule takes a text; found {value_text(value)}")


def _notes(model: Model, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    note = training_note(model, findings)
    return (note,) if note else ()


def _sealed_parts(model: Model) -> Iterator[str]:
    if _seal(model):
        yield f"the model is {_seal(model)}"
    for outer in state.modules_of(model):
        for name, module in outer.named_modules():
            where = name or type(module).__name__
            if module is not model and _seal(module):
                yield f"{where} is {_seal(module)}"
            yield from (f"{function}, which {where} calls, is compiled" for function in _compiled_in(module))


def _compiled_in(module: nn.Module) -> Iterator[str]:
    """The compiled functions that the source of ``forward`` names: globals, and methods of the module."""
    forward = getattr(type(module), "forward", None)
    code = getattr(forward, "__code__", None)
    held = {**getattr(forward, "__globals__", {}), **vars(type(module))}
    yield from (name for name in (code.co_names if code else ()) if hasattr(held.get(name), _COMPILED_MARK))


_COMPILED_MARK = "_torchdynamo_orig_callable"


def _seal(part: Any) -> str:
    if isinstance(part, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "scripted"
    # Look for the marks of torch.compile, because to import torch._dynamo for its classes takes a second.
    marks = (_COMPILED_MARK, "_orig_mod")
    forward = getattr(part, "forward", None)
    is_compiled = any(hasattr(part, mark) for mark in marks) or hasattr(forward, marks[0])
    return "compiled" if is_compiled or getattr(part, "_compiled_call_impl", None) is not None else ""


def _unseen(seen: ProbeResults) -> list[str]:
    traces = (seen.first, *seen.elsewhere.values())
    subclasses = sorted({name for trace in traces for name in trace.subclasses})
    refused = [operation.refused for trace in traces for operation in trace.operations]
    custom = {each.operation.replace(".", "::", 1) for each in refused if each is not None and each.id == "unknown-op"}
    branches = {
        f"the branch at {replace(operation.site, line=line)}, which runs only on a GPU"
        for operation in seen.first.operations
        if operation.site is not None
        for line in gpu_branches(operation.site)
    }
    return [
        *(f"operations inside {name} tensors" for name in subclasses),
        *(f"custom operator {operation}" for operation in sorted(custom)),
        *sorted(branches),
    ]

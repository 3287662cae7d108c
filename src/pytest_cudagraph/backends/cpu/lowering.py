"""One operation to one callable that writes its results into their fixed buffers.

Where an ``out=`` form exists it saves the copy. It is taken only if it gives the same bits as the operation did, which
is tried out on the spot: some forms compute in another order.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.buffers import poison_value
from pytest_cudagraph.backends.cpu.memory import ResultPath, copier, fresh_results, overlaps
from pytest_cudagraph.backends.cpu.operators import QuietMode, Traits, bind, find_binding, traits_of

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperation:
    """One operation as it ran: ``args`` and ``kwargs`` by address, ``fresh`` its results in memory of their own."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    fresh: tuple[tuple[ResultPath, torch.Tensor], ...]


def recompute(operation: RecordedOperation) -> Step:
    """Run the operation again, then copy its fresh results into their buffers; no copy where there are none."""
    compute = bind(operation.func, operation.args, operation.kwargs, operation.result)
    return store(compute, [(path, copier(buffer)) for path, buffer in operation.fresh])


def store(compute: Callable[[], Any], copies: list[tuple[ResultPath, Callable[[Any], object]]]) -> Step:
    """Call, then hand each wanted part of the result to its copier; a path of no steps is the result itself."""
    if not copies:
        return compute
    if len(copies) == 1 and not copies[0][0]:
        return _store_one(compute, copies[0][1])

    if all(len(path) == 1 for path, _ in copies):
        return _store_items(compute, [(path[0], copy) for path, copy in copies])

    def step() -> None:
        result = compute()
        for path, copy in copies:
            copy(functools.reduce(lambda part, index: part[index], path, result))

    return step


def write_in_place(operation: RecordedOperation) -> Step | None:
    """The fastest callable that writes the operation's bits straight into its buffers; None where there is none."""
    if any(overlaps(buffer) for _, buffer in operation.fresh):
        return None
    for proposal in _proposals(operation):
        if _gives_same_bits(proposal, [buffer for _, buffer in operation.fresh]):
            return proposal
    return None


def _store_one(compute: Callable[[], Any], copy: Callable[[Any], object]) -> Step:
    return lambda: copy(compute())


def _store_items(compute: Callable[[], Any], copies: list[tuple[int, Callable[[Any], object]]]) -> Step:
    def step() -> None:
        result = compute()
        for index, copy in copies:
            copy(result[index])

    return step


def _proposals(operation: RecordedOperation) -> Iterator[Step]:
    func, args, buffers = operation.func, operation.args, [buffer for _, buffer in operation.fresh]
    if func._schema.name in ("aten::clone", "aten::_to_copy") and args[0].shape == buffers[0].shape:
        yield functools.partial(buffers[0].copy_, args[0])
    if func._schema.name == "aten::relu":
        # relu has no out= form of its own, and clamp_min at 0 is how torch computes it.
        yield functools.partial(torch.clamp_min, args[0], 0, out=buffers[0])
    form = _out_form(func)
    if form is not None and len(form.names) == len(buffers) == _results(operation.result):
        yield from _out_calls(operation, form, buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutForm:
    func: torch._ops.OpOverload
    names: tuple[str, ...]


def _out_calls(operation: RecordedOperation, form: _OutForm, buffers: list[torch.Tensor]) -> Iterator[Step]:
    args = operation.args
    kwargs = {**operation.kwargs, **dict(zip(form.names, buffers, strict=True))}
    out: Any = buffers[0] if len(buffers) == 1 else tuple(buffers)
    binding = find_binding(form.func, args, kwargs, out, {**operation.kwargs, "out": out})
    if binding is not None:
        yield binding


@functools.cache
def _out_form(func: torch._ops.OpOverload) -> _OutForm | None:
    """The overload that takes the same arguments and writes every result; generated ones only compute and copy."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        arguments = candidate._schema.arguments
        names = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        plain = [(a.name, str(a.type)) for a in arguments if a.name not in names]
        if names and plain == wanted and len(names) == len(func._schema.returns):
            return _OutForm(func=candidate, names=names)
    return None


def _results(result: Any) -> int:
    return len(result) if isinstance(result, (list, tuple)) else 1


def _gives_same_bits(proposal: Step, buffers: list[torch.Tensor]) -> bool:
    wanted = [buffer.clone() for buffer in buffers]
    layouts = [_layout(buffer) for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.fill_(poison_value(buffer.dtype))
        with warnings.catch_warnings():
            # Of a result that is first resized, which a test that makes warnings errors must not hear of.
            warnings.simplefilter("error")
            proposal()
        if layouts == [_layout(b) for b in buffers] and all(map(_equal_bits, buffers, wanted)):
            return True
    except (RuntimeError, TypeError, ValueError, Warning):  # a form that does not take these arguments is no form
        pass
    for buffer, before in zip(buffers, wanted, strict=True):
        buffer.copy_(before)
    return False


def _layout(buffer: torch.Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.stride(), buffer.untyped_storage().data_ptr()


def _equal_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if torch.equal(found, wanted):
        return True
    both_nan = found.ne(found) & wanted.ne(wanted)
    return bool((found.eq(wanted) | both_nan).all())


class _Abandoned(Exception):
    """The parts are more than one kernel, or have effects that must not happen twice."""


class CompositeProbe(QuietMode):
    """Runs the parts of one composite; stops before the second kernel and before any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: RecordedOperation | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = _harmless(func, args, kwargs)
        if traits.composite is not None:
            with self:
                return traits.composite(*args, **kwargs)
        if self.kernel is not None and not func.is_view:
            raise _Abandoned
        result = func(*args, **kwargs)
        fresh = fresh_results(result, args, kwargs)
        if fresh:
            if self.kernel is not None:
                raise _Abandoned
            self.kernel = RecordedOperation(func=func, args=args, kwargs=kwargs, result=result, fresh=fresh)
        return result


def run_by_parts(
    traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, RecordedOperation] | None:
    """The result and the only kernel of a composite; None where it has several, none, or effects."""
    if traits.composite is None or traits.random or traits.written(args, kwargs):
        return None
    trial = CompositeProbe()
    try:
        with trial:
            result = traits.composite(*args, **kwargs)
    except _Abandoned:
        return None
    return None if trial.kernel is None else (result, trial.kernel)


def _harmless(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traits:
    if not isinstance(func, torch._ops.OpOverload):
        raise _Abandoned
    traits = traits_of(func)
    if traits.random or traits.allocates or traits.metadata_only or traits.lifts or traits.written(args, kwargs):
        raise _Abandoned
    if hazards.refusal(func, args, kwargs) is not None:
        raise _Abandoned
    return traits

"""One operation, turned into one callable that writes its results into fixed buffers.

An ``out=`` form of the operator saves a copy. Some forms compute in another order, so each is run once at capture and
taken only if it gives the same bits as the operation.
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
from pytest_cudagraph.backends.capture_mode import ObservingMode, storage_key, tensors_of
from pytest_cudagraph.backends.cpu.memory import ResultPath, copier, fresh_results, overlaps
from pytest_cudagraph.backends.cpu.operators import Traits, bind, find_binding, traits_of
from pytest_cudagraph.hazards import RawFinding

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperation:
    """One operation as it ran. ``fresh`` are its results that share no memory with an argument."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    fresh: tuple[tuple[ResultPath, torch.Tensor], ...]

    @property
    def name(self) -> str:
        """``aten.add``."""
        return str(self.func.overloadpacket)


def recompute(operation: RecordedOperation) -> Step:
    """Run the operation again, then copy its fresh results into their buffers."""
    compute = bind(operation.func, operation.args, operation.kwargs, operation.result)
    return store(compute, [(path, copier(buffer)) for path, buffer in operation.fresh])


def store(compute: Callable[[], Any], copies: list[tuple[ResultPath, Callable[[Any], object]]]) -> Step:
    """Call, then copy the parts of the result. The empty path is the result itself."""
    if not copies:
        return compute
    if len(copies) == 1 and not copies[0][0]:
        copy_whole = copies[0][1]
        return lambda: copy_whole(compute())
    if all(len(path) == 1 for path, _ in copies):
        return _store_items(compute, [(path[0], copy) for path, copy in copies])

    def step() -> None:
        result = compute()
        for path, copy in copies:
            copy(functools.reduce(lambda part, index: part[index], path, result))

    return step


def write_in_place(operation: RecordedOperation) -> Step | None:
    """A callable that writes the same bits directly into the buffers, or None where there is none.

    Runs each candidate once, so the operation must have no other effect.
    """
    if any(overlaps(buffer) for _, buffer in operation.fresh):
        return None
    buffers = [buffer for _, buffer in operation.fresh]
    return next((step for step in _candidates(operation, buffers) if _gives_same_bits(step, buffers)), None)


def _store_items(compute: Callable[[], Any], copies: list[tuple[int, Callable[[Any], object]]]) -> Step:
    def step() -> None:
        result = compute()
        for index, copy in copies:
            copy(result[index])

    return step


def _candidates(operation: RecordedOperation, buffers: list[torch.Tensor]) -> Iterator[Step]:
    func, args = operation.func, operation.args
    if func._schema.name in ("aten::clone", "aten::_to_copy") and args[0].shape == buffers[0].shape:
        yield functools.partial(buffers[0].copy_, args[0])
    if func._schema.name == "aten::relu":
        # relu has no out= form. Torch computes it as clamp_min at 0.
        yield functools.partial(torch.clamp_min, args[0], 0, out=buffers[0])
    form = _out_form(func)
    results = len(operation.result) if isinstance(operation.result, (list, tuple)) else 1
    if form is not None and len(form.names) == len(buffers) == results:
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
    """The overload that takes the same arguments and writes every result."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        arguments = candidate._schema.arguments
        names = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        plain = [(a.name, str(a.type)) for a in arguments if a.name not in names]
        if names and plain == wanted and len(names) == len(func._schema.returns):
            return _OutForm(func=candidate, names=names)
    return None


def _gives_same_bits(candidate: Step, buffers: list[torch.Tensor]) -> bool:
    wanted = [buffer.clone() for buffer in buffers]
    layouts = [_layout(buffer) for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.fill_(poison_value(buffer.dtype))
        with warnings.catch_warnings():
            # Torch warns before it resizes a buffer, and the user's test must not see that warning.
            warnings.simplefilter("error")
            candidate()
        if layouts == [_layout(b) for b in buffers] and all(map(_equal_bits, buffers, wanted)):
            return True
    except (RuntimeError, TypeError, ValueError, Warning):  # it does not take these arguments
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
    """The composite has effects that must not happen twice."""


class CompositeProbe(ObservingMode):
    """Runs and judges the parts of one composite operator. Stops before any effect outside it."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.refused: RawFinding | None = None
        """The first part that a capture refuses."""
        self._given = {storage_key(tensor) for tensor in tensors_of([args, dict(kwargs)])}
        self._kernels: list[RecordedOperation] = []
        self._is_simple = True

    @property
    def kernel(self) -> RecordedOperation | None:
        """The only kernel. None where there are several or none."""
        return self._kernels[0] if self._is_simple and len(self._kernels) == 1 else None

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = self._without_effects(func, args, kwargs)
        self.refused = self.refused or hazards.refusal(func, args, kwargs)
        if traits.composite is not None:
            with self:
                return traits.composite(*args, **kwargs)
        result = func(*args, **kwargs)
        fresh = fresh_results(result, args, kwargs)
        self._is_simple &= bool(fresh or func.is_view) and not traits.allocates
        if fresh:
            self._kernels.append(RecordedOperation(func=func, args=args, kwargs=kwargs, result=result, fresh=fresh))
        return result

    def _without_effects(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traits:
        if not isinstance(func, torch._ops.OpOverload):
            raise _Abandoned
        traits = traits_of(func)
        written = {storage_key(tensor) for tensor in traits.written(args, kwargs)}
        if traits.random or traits.metadata_only or traits.makes_constant or written & self._given:
            raise _Abandoned
        return traits


def run_by_parts(
    traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, CompositeProbe] | None:  # fmt: skip
    """The result of a composite operator and its judged parts. None where it is a single one or has effects."""
    if traits.composite is None or traits.random or traits.written(args, kwargs):
        return None
    probe = CompositeProbe(args, kwargs)
    try:
        with probe:
            return traits.composite(*args, **kwargs), probe
    except _Abandoned:
        return None

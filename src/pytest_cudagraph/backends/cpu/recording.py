"""Record one call, then restore the state, the random numbers and torch's functions."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from pytest_cudagraph import hazards, pytree
from pytest_cudagraph.backends.capture_mode import (
    ObservingMode,
    RefusedCall,
    claims_capture,
    hidden_from_compiler,
    moves_to_host,
    refused_calls,
    replaced,
    sends_number,
    storage_key,
    tensors_of,
)
from pytest_cudagraph.backends.cpu.memory import BorrowedMemory, names_of
from pytest_cudagraph.backends.cpu.tape import OpaqueCall, Refusals, Tape
from pytest_cudagraph.backends.placement import HOST_DRAW_TEXT, Placement
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Site


class SeenMemory(ObservingMode):
    """Notes the storages of all dispatched operations, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def has_seen(self, key: int) -> bool:
        """Whether an observed call used this storage, which still exists."""
        return key in self._seen

    def see(self, values: Any) -> None:
        """Note the tensors in arguments or results."""
        for tensor in tensors_of(values):
            key = storage_key(tensor)
            if key is not None and key not in self._seen:
                self._seen[key] = weakref.ref(tensor.untyped_storage(), functools.partial(self._forget, key))

    def _forget(self, key: int, ref: object) -> None:
        # Another storage may get the key of a freed one.
        self._seen.pop(key, None)

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.see((args, kwargs))
        result = func(*args, **kwargs)
        self.see(result)
        return result


def record(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: SeenMemory | None = None
) -> tuple[Tape, Any]:
    """Record one call. Return its tape, and its output, which is poisoned: a CUDA capture computes nothing either.

    ``seen`` is the memory of earlier calls. New memory that the recording has not made came from where it cannot see.
    Raises the first :class:`~pytest_cudagraph.errors.CaptureRefusal`, also where the model caught it.
    """
    refusals = Refusals()
    names = names_of(model)
    is_known = None if seen is None else lambda key: key in names or seen.has_seen(key)
    inputs = [*pytree.tensors_in((args, kwargs))]
    tape = Tape(refusals, inputs=inputs, borrowed=BorrowedMemory(names), is_known=is_known)
    placement = placement_of(model, inputs, names)
    random = torch.get_rng_state()
    compiled = _compiled_frames()
    try:
        output = _call(model, args, kwargs, hidden_from_compiler(OperationRecorder)(tape, refusals, placement))
    except CaptureRefusal as refused:
        if _compiled_frames() != compiled:
            # A compilation saves the random state, which would be named as the reason.
            raise _compile_refusal(refused.site) from refused
        raise
    finally:
        tape.storages.undo()
        torch.set_rng_state(random)
    if _compiled_frames() != compiled:
        raise _compile_refusal(None)
    tape.storages.poison()
    return tape, output


def placement_of(model: Model, inputs: Iterable[torch.Tensor], names: Mapping[int, str]) -> Placement:
    """Inputs, parameters and buffers lie on the device. Other tensors of the model may lie on the host."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    held = (*owner.parameters(), *owner.buffers()) if isinstance(owner, nn.Module) else ()
    device = {storage_key(tensor) for tensor in tensors_of([*inputs, *held])}
    return Placement(device, kept=names.keys() - device)


def _call(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], recorder: OperationRecorder) -> Any:
    refusals = recorder.refusals
    try:
        with as_capturing(refusals, recorder.placement), recorder:
            output = model(*args, **kwargs)
    except Exception as exc:
        # The model may have turned the refusal into another error. The reason is the first refusal.
        if refusals.first is None or exc is refusals.first:
            raise
        raise refusals.first from exc
    if refusals.first is not None:
        raise refusals.first
    return output


def _compile_refusal(site: Site | None) -> CaptureRefusal:
    return CaptureRefusal(hazards.RNG_STATE_TEXT, hazard="control-flow", operation="torch.compile", site=site)


def _compiled_frames() -> int:
    """How many frames torch.compile has looked at in this process; 0 where it is not loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


@contextmanager
def as_capturing(refusals: Refusals, placement: Placement) -> Iterator[None]:
    """Refuse the calls that a capture refuses, and say that a stream is capturing."""
    refusing = (
        (call.owner, call.name, functools.partial(_refusing, call, refusals, placement)) for call in refused_calls()
    )
    with replaced(refusing), replaced(claims_capture(lambda: refusals.is_active)):
        yield


def _refusing(
    call: RefusedCall, refusals: Refusals, placement: Placement, original: Callable[..., Any]
) -> Callable[..., Any]:
    def is_legal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if call.name == "to" and not moves_to_host(args, kwargs, by_name=True):
            return True
        if call.hazard == "host-data":
            return not sends_number(*args, **kwargs, by_name=True)
        is_read = call.is_legal_on_host and call.hazard == "host-sync" and isinstance(args[0], torch.Tensor)
        return is_read and placement.may_read(args[0])

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if refusals.is_active and not is_legal(args, kwargs):
            refusals.refuse(call.text, hazard=call.hazard, operation=call.label)
        return original(*args, **kwargs)

    return refuse


_DENSE_KEY = torch._C.DispatchKey.CompositeExplicitAutograd

# The plain forms of most other operators do not run under a dispatch mode.
_KNOWN_PARTS = frozenset({"flex_attention"})


class OperationRecorder(ObservingMode):
    """Records the operations of one call on a tape, and refuses what a CUDA capture refuses."""

    def __init__(self, tape: Tape, refusals: Refusals, placement: Placement) -> None:
        super().__init__()
        self._tape = tape
        self.refusals = refusals
        self.placement = placement

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.refusals.check()
        name = str(getattr(func, "overloadpacket", func).__name__)
        self._refuse(func, name, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self._record_parts(func, args, kwargs)
        given = list(tensors_of((args, kwargs)))
        with self.refusals.paused():
            is_host_work = self.placement.makes_on_host(given)
            result = func(*args, **kwargs) if is_host_work else self._tape.record(func, args, kwargs)
            made = list(tensors_of(result))
            if is_host_work:
                self._tape.keep_on_host(made)
            self.placement.place(name, given, made)
        return result

    def _refuse(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = hazards.judge(func, args, kwargs, self.placement.is_number)
        found = self.placement.judged(found, func, name, args, kwargs)
        # A capture accepts numbers that the host draws. They are frozen, and only the audit knows.
        if found is not None and found.level == "error" and found.text != HOST_DRAW_TEXT:
            self.refusals.refuse(found.text, hazard=found.id, operation=found.operation)

    def record_region(self, region: OpaqueCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record compiled code as one step."""
        self.refusals.check()
        # This call does not come from the dispatcher, so the modes are still on.
        with self.refusals.paused(), _disable_current_modes():
            result = self._tape.record_region(region, args, kwargs)
            self.placement.place(region.label, list(tensors_of((args, kwargs))), list(tensors_of(result)))
            return result

    def _record_parts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record the operations that the plain form of a higher-order operator dispatches."""
        name = func.name()
        if name not in _KNOWN_PARTS:
            text = "the CPU twin does not support this higher-order operator"
            self.refusals.refuse(text, hazard="unknown-op", operation=name)
        with self:
            return func.py_kernels[_DENSE_KEY](*args, **kwargs)

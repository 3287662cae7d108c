"""Record one call, then restore the state, the random numbers and torch's functions."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from pytest_cudagraph import hazards, pytree
from pytest_cudagraph.backends.capture_mode import (
    ObservingMode,
    RefusedCall,
    claims_capture,
    hidden_from_compiler,
    moves_to_host,
    refused_calls,
    replaced,
    storage_key,
    tensors_of,
)
from pytest_cudagraph.backends.cpu.memory import BorrowedMemory, names_of
from pytest_cudagraph.backends.cpu.tape import OpaqueCall, Refusals, Tape
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Site


class SeenMemory(ObservingMode):
    """Notes the storages of all dispatched operations, without keeping them alive."""

    supports_higher_order_operators = True

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        kwargs = kwargs or {}
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
    tape = Tape(refusals, inputs=pytree.tensors_in((args, kwargs)), borrowed=BorrowedMemory(names), is_known=is_known)
    random = torch.get_rng_state()
    compiled = _compiled_frames()
    try:
        output = _call(model, args, kwargs, tape, refusals)
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


def _call(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], tape: Tape, refusals: Refusals) -> Any:
    try:
        with as_capturing(refusals), hidden_from_compiler(OperationRecorder)(tape, refusals):
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
def as_capturing(refusals: Refusals) -> Iterator[None]:
    """Refuse the calls that a capture refuses, and say that a stream is capturing."""
    refusing = ((call.owner, call.name, functools.partial(_refusing, call, refusals)) for call in refused_calls())
    with replaced(refusing), replaced(claims_capture(lambda: refusals.is_active)):
        yield


def _refusing(call: RefusedCall, refusals: Refusals, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if refusals.is_active and (call.name != "to" or moves_to_host(args, kwargs, by_name=True)):
            refusals.refuse(call.text, hazard=call.hazard, operation=call.label)
        return original(*args, **kwargs)

    return refuse


_DENSE_KEY = torch._C.DispatchKey.CompositeExplicitAutograd

# The host reads a tensor to decide, except in torch's conditional graphs.
_READS_ITS_CONDITION = frozenset({"cond", "while_loop"})

# The plain forms of most other operators do not run under a dispatch mode.
_KNOWN_PARTS = frozenset({"flex_attention"})


class OperationRecorder(ObservingMode):
    """Records the operations of one call on a tape, and refuses what a CUDA capture refuses."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, refusals: Refusals) -> None:
        super().__init__()
        self._tape = tape
        self._refusals = refusals

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._refusals.check()
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # torch then asks the subclass, whose inner operations come here
        kwargs = kwargs or {}
        found = hazards.refusal(func, args, kwargs, from_host=self._tape.is_number)
        if found is not None:
            self._refusals.refuse(found.text, hazard=found.id, operation=found.operation)
        if isinstance(func, torch._ops.OpOverload):
            with self._refusals.paused():
                return self._tape.record(func, args, kwargs)
        return self._record_parts(func, args, kwargs)

    def record_region(self, region: OpaqueCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record compiled code as one step."""
        self._refusals.check()
        # This call does not come from the dispatcher, so the modes are still on.
        with self._refusals.paused(), _disable_current_modes():
            return self._tape.record_region(region, args, kwargs)

    def _record_parts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record the operations that the plain form of a higher-order operator dispatches."""
        name = func.name()
        if name in _READS_ITS_CONDITION:
            self._refusals.refuse(hazards.CAPTURE_UNSUPPORTED.text, hazard="host-sync", operation=name)
        if name not in _KNOWN_PARTS:
            text = "the CPU twin does not support this higher-order operator"
            self._refusals.refuse(text, hazard="unknown-op", operation=name)
        with self:
            return func.py_kernels[_DENSE_KEY](*args, **kwargs)

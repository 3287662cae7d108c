"""Operations to steps: what a replay must run again, and what it need not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.backends.cpu.lowering import Operation, Step, recompute, store, write_in_place
from pytest_cudagraph.backends.cpu.refusals import Refusals
from pytest_cudagraph.backends.cpu.results import fresh_results
from pytest_cudagraph.backends.cpu.storages import Ledger, copier, same_layout, storage_key
from pytest_cudagraph.backends.cpu.traits import Traits, baked, tensors_of, traits_of
from pytest_cudagraph.backends.cpu.trial import run_by_parts


class Region(Protocol):
    """What the tape must know of compiled code."""

    label: str

    def execute(self, *args: Any, **kwargs: Any) -> Any: ...

    def execute_uncounted(self, *args: Any, **kwargs: Any) -> Any: ...


class Tape:
    """One call's operations, their steps, and the memory they work on."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._setup: list[Step] = []
        self._steps: list[Step] = []
        self._constants: dict[int | None, torch.Tensor] = {}
        self._reset: set[int | None] = set()
        self.ledger = Ledger()
        self.operations = 0
        self.opaque_regions = 0
        self.kernel_names: Counter[str] = Counter()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All that a replay runs, in order."""
        return (*self._setup, *self._steps)

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was made from a number of the host during this call."""
        return storage_key(tensor) in self._constants

    def record(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation for its result, and add what a replay must do for it."""
        self.operations += 1
        traits = traits_of(func)
        written = traits.written(args, kwargs)
        self.ledger.save(written)
        self._reset_constants(written)
        parts = run_by_parts(traits, args, kwargs)
        result = parts[0] if parts is not None else func(*args, **kwargs)
        operation = self._operation(func, args, kwargs, result)
        if traits.lifts:
            self._lift(args[0])
        elif traits.allocates:
            self._own(operation)
        elif operation.fresh or (written and not traits.metadata_only):
            self._own(operation)
            self.kernel_names[traits.name] += 1
            self._steps.append(self._step(traits, operation, parts[1] if parts is not None else None, written))
        return result

    def record_region(self, region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run compiled code for its result, as one step that a replay runs as a whole. Needs all modes disabled."""
        self.operations += 1
        self.opaque_regions += 1
        self.kernel_names[region.label] += 1
        inputs = list(tensors_of([args, dict(kwargs)]))
        # What the code writes to cannot be seen: everything it is given may be changed.
        self.ledger.save(inputs)
        self._reset_constants(inputs)
        given: tuple[Any, Any] = (baked(args), baked(dict(kwargs)))
        result = region.execute_uncounted(*args, **kwargs)
        flat, structure = leaves.flatten(result)
        own, copies = self._own_region_results(flat, inputs)
        self._steps.append(store(_region_call(region, *given), copies))
        return leaves.unflatten(structure, own)

    def _own_region_results(
        self, flat: list[Any], inputs: list[torch.Tensor]
    ) -> tuple[list[Any], list[tuple[tuple[int, ...], Callable[[Any], object]]]]:
        given = {storage_key(tensor) for tensor in inputs}
        copies: list[tuple[tuple[int, ...], Callable[[Any], object]]] = []
        for index, leaf in enumerate(flat):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in given:
                # A copy, because compiled code may keep what it returns, which then must not be poisoned.
                flat[index] = same_layout(leaf)
                self._own_tensor(flat[index], "a compiled region")
                copies.append(((index,), copier(flat[index].detach())))
        return flat, copies

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Operation:
        fresh = tuple((path, tensor.detach()) for path, tensor in fresh_results(result, args, kwargs))
        return Operation(func=func, args=baked(args), kwargs=baked(dict(kwargs)), result=result, fresh=fresh)

    def _step(
        self, traits: Traits, operation: Operation, kernel: Operation | None, written: list[torch.Tensor]
    ) -> Step:
        # An operation with effects must not be tried out: it would have them twice.
        tried = None if written or traits.random else operation if kernel is None else _baked(kernel)
        step = write_in_place(tried) if tried is not None else None
        if step is None or tried is None:
            return recompute(operation)
        self._own(tried)
        return step

    def _own(self, operation: Operation) -> None:
        for _, tensor in operation.fresh:
            self._own_tensor(tensor, str(operation.func.overloadpacket))

    def _own_tensor(self, tensor: torch.Tensor, operation: str) -> None:
        key = storage_key(tensor)
        if key is None:
            layout = str(tensor.layout).removeprefix("torch.")
            self._refusals.refuse(
                f"the CPU twin cannot keep a result of layout {layout} at a fixed address",
                hazard="unknown-op",
                operation=operation,
            )
        self.ledger.add_made(key, tensor)

    def _lift(self, constant: torch.Tensor) -> None:
        # torch.tensor(0.5): no kernel on CUDA, which keeps a 0-dim CPU tensor as a number.
        key = storage_key(constant)
        if key is not None:
            self._constants[key] = constant.detach()

    def _reset_constants(self, written: list[torch.Tensor]) -> None:
        # Eager makes the constant anew in every call, so a replay that writes to it must first put it back.
        for key in {storage_key(tensor) for tensor in written} & self._constants.keys() - self._reset:
            constant = self._constants[key]
            self._setup.append(partial(constant.copy_, constant.clone()))
            self._reset.add(key)


def _baked(kernel: Operation) -> Operation:
    fresh = tuple((path, tensor.detach()) for path, tensor in kernel.fresh)
    return replace(kernel, args=baked(kernel.args), kwargs=baked(dict(kernel.kwargs)), fresh=fresh)


def _region_call(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        # Lists anew each time: compiled code empties the list it is given, to free its inputs early.
        arguments = [list(item) if type(item) is list else item for item in args]
        return leaves.flatten(region.execute(*arguments, **kwargs))[0]

    return call

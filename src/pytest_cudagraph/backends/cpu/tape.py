"""Operations to steps: what a replay must run again, and what it need not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from pytest_cudagraph import hazards, pytree, sources
from pytest_cudagraph.backends.cpu.lowering import (
    RecordedOperation,
    Step,
    recompute,
    run_by_parts,
    store,
    write_in_place,
)
from pytest_cudagraph.backends.cpu.memory import (
    BorrowedMemory,
    StorageHistory,
    copier,
    fresh_results,
    plain,
    same_layout,
    storage_key,
)
from pytest_cudagraph.backends.cpu.operators import Traits, baked, tensors_of, traits_of
from pytest_cudagraph.errors import CaptureRefusal


class Refusals:
    """The verdict on one capture while it is recorded: a refusal stays, also when the model swallows it."""

    def __init__(self) -> None:
        self.first: CaptureRefusal | None = None
        self._thread = threading.get_ident()
        self._deaf = 0

    @property
    def listening(self) -> bool:
        """Whether what happens now is the model's doing: on the recording thread, outside the recorder itself."""
        return not self._deaf and threading.get_ident() == self._thread

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """While the recorder works, its own reads of tensors are no reason to refuse."""
        self._deaf += 1
        try:
            yield
        finally:
            self._deaf -= 1

    def refuse(self, text: str, *, hazard: str, operation: str) -> NoReturn:
        """Raise the reason; any later one is CUDA's complaint about the first."""
        if self.first is None:
            self.first = CaptureRefusal(text, hazard=hazard, operation=operation, site=sources.user_site())
            raise self.first
        self.check()
        raise self.first

    def check(self) -> None:
        """Raise what CUDA says of every operation that follows a refused one."""
        if self.first is not None:
            raise CaptureRefusal(
                hazards.CAPTURE_INVALIDATED.text, hazard=self.first.hazard, operation=self.first.operation
            ) from self.first


Known = Callable[[int], bool]
"""Whether a storage was there before the recorded call."""

_UNSEEN = (
    "a tensor is taken that was made during this call where the recording sees nothing, by another thread, "
    "in memory of the host or by compiled code: a replay would read it as it was"
)


class Region(Protocol):
    """What the tape must know of compiled code."""

    label: str

    def execute(self, *args: Any, **kwargs: Any) -> Any: ...

    def execute_uncounted(self, *args: Any, **kwargs: Any) -> Any: ...


class Tape:
    """One call's operations, their steps, and the memory they work on."""

    def __init__(
        self, refusals: Refusals, *, inputs: Iterable[torch.Tensor], outside: BorrowedMemory, known: Known | None = None
    ) -> None:
        self._refusals = refusals
        self._inputs = {storage_key(tensor) for tensor in inputs}
        self._known = known
        self._setup: list[Step] = []
        self._steps: list[Step] = []
        self._opaque: set[Step] = set()
        self.outside = outside
        self._constants: dict[int | None, torch.Tensor] = {}
        self._reset: set[int | None] = set()
        self.ledger = StorageHistory()
        self.operations = 0
        self.opaque_regions = 0
        self.kernel_names: Counter[str] = Counter()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All that a replay runs, in order."""
        return (*self._setup, *self._steps)

    @property
    def opaque(self) -> frozenset[Step]:
        """The steps whose inside is not PyTorch's own: compiled code and custom operators."""
        return frozenset(self._opaque)

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
        if traits.lifts:
            self._lift(args[0])
            return result
        operation = self._operation(func, args, kwargs, result)
        if traits.allocates:
            self._own(operation)
        elif operation.fresh or (written and not traits.metadata_only):
            self._own(operation)
            self.kernel_names[traits.name] += 1
            step = self._step(traits, operation, parts[1] if parts is not None else None, written)
            self._add(step, is_opaque=func.namespace != "aten")
        return result

    def check_origin(self, outputs: Iterable[torch.Tensor]) -> None:
        """Refuse an output that no step writes and that was not there before: every replay would return it as it is."""
        for tensor in outputs:
            key = storage_key(tensor)
            if key is not None and not self._is_own(key) and self._known is not None and not self._known(key):
                raise CaptureRefusal(_UNSEEN, hazard="foreign-tensor", operation="output")

    def record_region(self, region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run compiled code for its result, as one step that a replay runs as a whole. Needs all modes disabled."""
        self.operations += 1
        self.opaque_regions += 1
        self.kernel_names[region.label] += 1
        inputs = list(tensors_of([args, dict(kwargs)]))
        # What the code writes to cannot be seen: everything it is given may be changed.
        self.ledger.save(inputs)
        self._reset_constants(inputs)
        given: tuple[Any, Any] = self._baked((args, dict(kwargs)), region.label)
        result = region.execute_uncounted(*args, **kwargs)
        flat, structure = pytree.flatten(result)
        own, copies = self._own_region_results(flat, inputs)
        self._add(store(_region_call(region, *given), copies), is_opaque=True)
        return pytree.unflatten(structure, own)

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

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> RecordedOperation:
        fresh = tuple((path, tensor.detach()) for path, tensor in fresh_results(result, args, kwargs))
        baked_args, baked_kwargs = self._baked((args, dict(kwargs)), str(func.overloadpacket))
        return RecordedOperation(func=func, args=baked_args, kwargs=baked_kwargs, result=result, fresh=fresh)

    def _baked(self, arguments: Any, operation: str) -> Any:
        """The same by address: what the graph owns stays alive with it, all else is borrowed."""
        return baked(arguments, lambda tensor: self._alias(tensor, operation))

    def _alias(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        key = storage_key(tensor)
        if self._is_own(key):
            return plain(tensor)
        if key is not None and self._known is not None and not self._known(key):
            self._refusals.refuse(_UNSEEN, hazard="foreign-tensor", operation=operation)
        return self.outside.borrow(tensor, operation)

    def _is_own(self, key: int | None) -> bool:
        return key in self._inputs or key in self._constants or self.ledger.is_made(key)

    def _add(self, step: Step, *, is_opaque: bool) -> None:
        self._steps.append(step)
        if is_opaque:
            self._opaque.add(step)

    def _step(
        self,
        traits: Traits,
        operation: RecordedOperation,
        kernel: RecordedOperation | None,
        written: list[torch.Tensor],
    ) -> Step:
        # An operation with effects must not be tried out: it would have them twice.
        tried = None if written or traits.random else operation if kernel is None else self._kernel(kernel)
        step = write_in_place(tried) if tried is not None else None
        if step is None or tried is None:
            return recompute(operation)
        self._own(tried)
        return step

    def _kernel(self, kernel: RecordedOperation) -> RecordedOperation:
        fresh = tuple((path, tensor.detach()) for path, tensor in kernel.fresh)
        args, kwargs = self._baked((kernel.args, dict(kernel.kwargs)), str(kernel.func.overloadpacket))
        return replace(kernel, args=args, kwargs=kwargs, fresh=fresh)

    def _own(self, operation: RecordedOperation) -> None:
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


def _region_call(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        # Lists anew each time: compiled code empties the list it is given, to free its inputs early.
        arguments = [list(item) if type(item) is list else item for item in args]
        return pytree.flatten(region.execute(*arguments, **kwargs))[0]

    return call

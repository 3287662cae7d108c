"""The tape: one call's operations, turned into the steps that a replay runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from pytest_cudagraph import hazards, pytree, sources
from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
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
    has_memory,
    plain_alias,
    same_layout,
)
from pytest_cudagraph.backends.cpu.operators import Traits, baked, traits_of
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.hazards import collectives


class Refusals:
    """The refusals of one capture. The first one stays, also when the model catches it."""

    def __init__(self) -> None:
        self.first: CaptureRefusal | None = None
        self._thread = threading.get_ident()
        self._paused = 0

    @property
    def is_active(self) -> bool:
        """Whether the model itself is running: on the recording thread, outside the recorder."""
        return not self._paused and threading.get_ident() == self._thread

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Refuse nothing inside: the recorder may read tensors."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def refuse(self, text: str, *, hazard: str, operation: str) -> NoReturn:
        """Raise the first refusal. After it, raise CUDA's complaint about an invalidated capture."""
        if self.first is None:
            self.first = CaptureRefusal(text, hazard=hazard, operation=operation, site=sources.user_site())
            raise self.first
        self.check()
        raise self.first

    def check(self) -> None:
        """Raise CUDA's complaint if an earlier operation was refused."""
        if self.first is not None:
            raise CaptureRefusal(
                hazards.CAPTURE_INVALIDATED.text, hazard=self.first.hazard, operation=self.first.operation
            ) from self.first


_UNSEEN = (
    "this tensor was made during the call where the recording cannot see it: by another thread, "
    "in host memory or by compiled code. A replay would read its old values"
)


class OpaqueCall(NamedTuple):
    """Compiled code, which the tape runs as a whole."""

    label: str
    run: Callable[..., Any]
    """Runs the code for the recording."""
    replay: Callable[..., Any]
    """Runs the code for a replay, and counts it."""


class Tape:
    """One call's operations, their steps, and the memory they work on.

    ``is_known`` says of a storage key whether the storage existed before the recorded call.
    """

    def __init__(
        self,
        refusals: Refusals,
        *,
        inputs: Iterable[torch.Tensor],
        borrowed: BorrowedMemory,
        is_known: Callable[[int], bool] | None = None,
    ) -> None:
        self.borrowed = borrowed
        self.storages = StorageHistory()
        self.operations = 0
        self.opaque_regions = 0
        self.kernel_names: Counter[str] = Counter()
        self._refusals = refusals
        self._inputs = {storage_key(tensor) for tensor in inputs}
        self._is_known = is_known or (lambda key: True)
        self._constants: dict[int | None, torch.Tensor] = {}
        self._host: set[int | None] = set()
        self._restored: set[int | None] = set()
        self._setup: list[Step] = []
        self._steps: list[Step] = []
        self._opaque: set[Step] = set()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps of a replay, in order."""
        return (*self._setup, *self._steps)

    @property
    def opaque(self) -> frozenset[Step]:
        """The steps that may run code outside PyTorch: compiled code and custom operators."""
        return frozenset(self._opaque)

    def keep_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep what the host computed. It is in no step, so that every replay uses the values of the recording."""
        for tensor in tensors:
            self._add_constant(tensor)
            self._host.add(storage_key(tensor))

    def record(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation for its result, and add the step that repeats it."""
        self.operations += 1
        traits = traits_of(func)
        if traits.hands_on:
            return func(*args, **kwargs)
        written = traits.written(args, kwargs)
        self._save(written)
        result, kernel = self._run(func, traits, args, kwargs)
        if traits.makes_constant:
            self._add_constant(args[0])
            return result
        fresh = fresh_results(result, args, kwargs)
        operation = self._by_address(RecordedOperation(func=func, args=args, kwargs=kwargs, result=result, fresh=fresh))
        self._own(operation)
        if not traits.allocates and (fresh or (written and not traits.metadata_only)):
            self.kernel_names[traits.name] += 1
            has_effects = bool(written) or traits.random or traits.collective
            step = recompute(operation) if has_effects else self._fastest_step(operation, kernel)
            self._add(step, is_opaque=func.namespace != "aten")
        return result

    def _run(
        self, func: torch._ops.OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, RecordedOperation | None]:
        """The result of an operation, and its only kernel if it is composite. Its parts may be refused."""
        if traits.collective:
            return collectives.run_to_end(func, *args, **kwargs), None
        found = run_by_parts(traits, args, kwargs)
        if found is None:
            return func(*args, **kwargs), None
        result, parts = found
        if parts.refused is not None and not hazards.is_judged(func):
            self._refusals.refuse(parts.refused.text, hazard=parts.refused.id, operation=parts.refused.operation)
        return (result, parts.kernel) if parts.kernel else (func(*args, **kwargs), None)

    def record_region(self, region: OpaqueCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run compiled code for its result, and add it as one step. Call it with all dispatch modes disabled."""
        self.operations += 1
        self.opaque_regions += 1
        self.kernel_names[region.label] += 1
        inputs = list(tensors_of([args, dict(kwargs)]))
        # The code may write to any of its inputs: the recording cannot see which.
        self._save(inputs)
        baked_args, baked_kwargs = self._baked((args, dict(kwargs)), region.label)
        leaves, structure = pytree.flatten(region.run(*args, **kwargs))
        copies = self._own_region_results(leaves, {storage_key(tensor) for tensor in inputs})
        self._add(store(_region_call(region, baked_args, baked_kwargs), copies), is_opaque=True)
        return pytree.unflatten(structure, leaves)

    def check_origin(self, outputs: Iterable[torch.Tensor]) -> None:
        """Refuse an output that no step writes and that is new: every replay would return its old values."""
        for tensor in outputs:
            if not has_memory(tensor):
                raise CaptureRefusal(
                    f"the CPU twin cannot renew an output of class {type(tensor).__name__}, which wraps other tensors",
                    hazard="unknown-op",
                    operation="output",
                    fix="return the tensor inside it: to_local() of a DTensor, wait() of an AsyncCollectiveTensor",
                )
            if self._is_unseen(storage_key(tensor)):
                raise CaptureRefusal(_UNSEEN, hazard="foreign-tensor", operation="output")

    def _fastest_step(self, operation: RecordedOperation, kernel: RecordedOperation | None) -> Step:
        # write_in_place tries each form by running it, hence only operations without effects come here.
        candidate = operation if kernel is None else self._by_address(kernel)
        step = write_in_place(candidate)
        if step is None:
            return recompute(operation)
        self._own(candidate)
        return step

    def _add(self, step: Step, *, is_opaque: bool) -> None:
        self._steps.append(step)
        if is_opaque:
            self._opaque.add(step)

    def _by_address(self, operation: RecordedOperation) -> RecordedOperation:
        """The same operation on aliases, which no later rebinding of the model's tensors reaches."""
        fresh = tuple((path, tensor.detach()) for path, tensor in operation.fresh)
        args, kwargs = self._baked((operation.args, dict(operation.kwargs)), operation.name)
        return replace(operation, args=args, kwargs=kwargs, fresh=fresh)

    def _baked(self, arguments: Any, operation: str) -> Any:
        return baked(arguments, lambda tensor: self._alias(tensor, operation))

    def _alias(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        key = storage_key(tensor)
        if key in self._host:
            return plain_alias(tensor.clone())  # by value: the host may write to it later
        if self._is_own(key):
            return plain_alias(tensor)
        if self._is_unseen(key):
            self._refusals.refuse(_UNSEEN, hazard="foreign-tensor", operation=operation)
        return self.borrowed.borrow(tensor, operation)

    def _is_own(self, key: int | None) -> bool:
        return key in self._inputs or key in self._constants or self.storages.is_made(key)

    def _is_unseen(self, key: int | None) -> bool:
        return key is not None and not self._is_own(key) and not self._is_known(key)

    def _own(self, operation: RecordedOperation) -> None:
        for _, tensor in operation.fresh:
            self._own_tensor(tensor, operation.name)

    def _own_tensor(self, tensor: torch.Tensor, operation: str) -> None:
        key = storage_key(tensor)
        if key is None:
            layout = str(tensor.layout).removeprefix("torch.")
            self._refusals.refuse(
                f"the CPU twin cannot keep a result of layout {layout} at a fixed address",
                hazard="unknown-op",
                operation=operation,
            )
        if not has_memory(tensor):
            self._refusals.refuse(
                f"the CPU twin cannot renew a result of class {type(tensor).__name__}, which wraps other tensors",
                hazard="unknown-op",
                operation=operation,
            )
        self.storages.add_made(key, tensor)

    def _own_region_results(
        self, leaves: list[Any], given: set[int | None]
    ) -> list[tuple[tuple[int, ...], Callable[[Any], object]]]:
        """Replace each new tensor among ``leaves`` by a buffer. Return the copies that fill the buffers."""
        copies: list[tuple[tuple[int, ...], Callable[[Any], object]]] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in given:
                # Compiled code may keep the tensor that it returns, and the tape poisons its buffers.
                leaves[index] = same_layout(leaf)
                self._own_tensor(leaves[index], "a compiled region")
                copies.append(((index,), copier(leaves[index].detach())))
        return copies

    def _add_constant(self, constant: torch.Tensor) -> None:
        # torch.tensor(0.5) launches no kernel on CUDA, which keeps a 0-dim CPU tensor as a number.
        key = storage_key(constant)
        if key is not None:
            self._constants[key] = constant.detach()

    def _save(self, written: list[torch.Tensor]) -> None:
        self.storages.save(written)
        self._host -= {storage_key(tensor) for tensor in written}
        # An eager call makes each constant anew. A replay that writes to one must first restore it.
        for key in {storage_key(tensor) for tensor in written} & self._constants.keys() - self._restored:
            constant = self._constants[key]
            self._setup.append(partial(constant.copy_, constant.clone()))
            self._restored.add(key)


def _region_call(region: OpaqueCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        # New lists each time: compiled code empties a list that it is given, to free its inputs early.
        arguments = [list(item) if type(item) is list else item for item in args]
        return pytree.flatten(region.replay(*arguments, **kwargs))[0]

    return call

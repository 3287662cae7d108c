"""Finds writes that no operation shows: by NumPy, DLPack, ctypes or C code, through the address of a tensor.

Each storage has a checksum from its last operation. If its checksum differs later, a hidden write has changed it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from pytest_cudagraph import hazards, pytree, sources
from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
from pytest_cudagraph.backends.cpu.memory import held_by, names_of
from pytest_cudagraph.backends.cpu.operators import traits_of
from pytest_cudagraph.backends.cpu.recording import SeenMemory, placement_of
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.values import Site

# Other code may write to any memory, and a replay repeats that.
_SEEN_INTO = frozenset({"aten", "prims"})

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 17  # a megabyte, so that the weights stay in the cache


class WatchedWarmUp(SeenMemory):
    """Runs warm-up calls, notes their memory, and looks for hidden writes."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: CaptureRefusal | None = None
        """For the first hidden write. Raise it after the recording, which may be refused for an earlier reason."""

    def call(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model."""
        named = dict(_named_inputs(args, kwargs))
        self._contents = Contents([*named.items(), *held_by(model)])
        self._placement = placement_of(model, named.values(), names_of(model))
        with self:
            output = model(*args, **kwargs)
        outputs = pytree.tensors_in(output)
        self.see(outputs)
        self._note(self._contents.changed_at_end(outputs))
        return output

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "namespace", "") not in _SEEN_INTO:
            return self._call_opaque(func, args, kwargs)
        given = list(tensors_of((args, kwargs)))
        self.see(given)
        if not func.is_view:
            self._note(self._contents.changed_among(given), str(func.overloadpacket), sources.user_site)
        result = func(*args, **kwargs)
        made = list(tensors_of(result))
        self.see(made)
        self._placement.place(func.overloadpacket.__name__, given, made)
        used = [*given, *made]
        self._contents.learn(traits_of(func).written(args, kwargs), used)
        # The host may write to its own tensors. A graph keeps their values.
        self._contents.forget(tensor for tensor in used if self._placement.place_of(tensor) == "host")
        return result

    def call_region(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call compiled code, whose kernels write by address."""
        # This call does not come from the dispatcher, so the modes are still on.
        with _disable_current_modes():
            return self._call_opaque(code, args, kwargs)

    def _call_opaque(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.see((args, kwargs))
        result = code(*args, **kwargs)
        self.see(result)
        self._contents.forget_all()
        return result

    def _note(self, changed: str, operation: str = "", site: Callable[[], Site | None] = lambda: None) -> None:
        if changed and self.refusal is None:
            text = hazards.HIDDEN_WRITE_TEXT.format(name=changed)
            self.refusal = CaptureRefusal(text, hazard="hidden-write", operation=operation, site=site())


def _named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for root, given in (("args", args), ("kwargs", kwargs)):
        for path, leaf in pytree.named_leaves(given):
            if isinstance(leaf, torch.Tensor):
                yield f"{root}{path}", leaf


class _KnownStorage(NamedTuple):
    """One storage after its last operation."""

    storage: weakref.ref[torch.UntypedStorage]
    checksum: int
    name: str = ""
    """Of memory from before the call."""
    is_parameter: bool = False


class Contents:
    """Checksums of all storages of one call. ``outside`` are its inputs and the model's tensors, by name."""

    def __init__(self, outside: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._known: dict[int | None, _KnownStorage] = {}
        for name, tensor in outside:
            self._learn(tensor, name, isinstance(tensor, nn.Parameter))

    def changed_among(self, tensors: Iterable[torch.Tensor]) -> str:
        """The name of the first of these tensors that changed since their last operation. Empty if none did.

        Parameters are compared at the end only. They are large, and many of them may share one storage.
        """
        for tensor in tensors:
            known = self._known.get(storage_key(tensor))
            if known is not None and not known.is_parameter and _is_changed(known):
                return known.name or f"a tensor of {tuple(tensor.shape)}"
        return ""

    def changed_at_end(self, outputs: Iterable[torch.Tensor]) -> str:
        """The same for what the call leaves: its outputs, and everything that was there before."""
        outside = (known.name for known in self._known.values() if known.name and _is_changed(known))
        return next(outside, "") or self.changed_among(outputs)

    def learn(self, written: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Note what an operation wrote and made. What it made may be a view of memory that is known."""
        for tensor in written:
            known = self._known.pop(storage_key(tensor), None)
            self._learn(tensor, *(known[2:] if known else ()))
        for tensor in made:
            self._learn(tensor)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Accept other contents of these tensors."""
        for tensor in tensors:
            self._known.pop(storage_key(tensor), None)

    def forget_all(self) -> None:
        """Accept other contents of all memory: code that the recording cannot look into may write anywhere."""
        self._known.clear()

    def _learn(self, tensor: torch.Tensor, name: str = "", is_parameter: bool = False) -> None:
        key = storage_key(tensor)
        if key is None or key in self._known:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # a simulated tensor names the CPU, but its storage is on meta
            return
        reference = weakref.ref(storage, functools.partial(self._freed, key))
        self._known[key] = _KnownStorage(reference, checksum(storage), name, is_parameter)

    def _freed(self, key: int, reference: object) -> None:
        # Another storage may get the key of a freed one.
        self._known.pop(key, None)


def _is_changed(known: _KnownStorage) -> bool:
    storage = known.storage()
    return storage is not None and checksum(storage) != known.checksum


def checksum(storage: torch.UntypedStorage) -> int:
    """The sum of all words with random odd weights, modulo 2**64, for each megabyte.

    An odd weight has an inverse modulo 2**64, so a change of one word always shows. A plain sum would miss another
    order of the same words.
    """
    row = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    words = row[: row.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    weights = _weights()
    sums = [int(torch.dot(chunk, weights[: chunk.numel()])) for chunk in torch.split(words, _CHUNK_WORDS)]
    return hash((*sums, *row[words.numel() * _WORD_BYTES :].tolist()))


@functools.cache
def _weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(2**62, (_CHUNK_WORDS,), generator=generator, device="cpu")
    return halves * 2 + 1

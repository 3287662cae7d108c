"""The rules of a capture, applied to the operations of one call as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import hazards
from pytest_cudagraph.audit.trace import storage_of
from pytest_cudagraph.backends.cpu.operators import Traits, traits_of
from pytest_cudagraph.backends.dispatch import storage_key
from pytest_cudagraph.hazards import Refusal
from pytest_cudagraph.protocols import Backend
from pytest_cudagraph.sources import Sites, user_frame, user_sites
from pytest_cudagraph.sources.syntax import names_host

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What a graph keeps by value. Of a generator, a storage or a function only the kind can be told."""

_PLAIN_EXACT = frozenset(_PLAIN)

LEGAL_BESIDE = ("aten.index_put_", "aten.masked_fill", "aten.fill_", "aten.one_hot")
"""Operations that make legal what happens beside them: a number they take, the range of classes that the CPU checks."""


class OperatorInfo(NamedTuple):
    """What is known of an operator whatever its arguments; holds it, so that its identity is not used again."""

    func: Any
    name: str
    short_name: str
    traits: Traits | None
    """None for a higher-order operator, which has no schema."""
    is_judged: bool
    may_draw: bool
    is_lift: bool
    is_legal_beside: bool

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call with these arguments writes to."""
        return [] if self.traits is None else self.traits.written(args, kwargs)


class Operators(dict[int, OperatorInfo]):
    """The facts of each operator by its identity: hashing an operator costs more than all that is asked of it."""

    def learn(self, func: Any) -> OperatorInfo:
        name, short_name = str(func), str(getattr(func, "overloadpacket", func).__name__)
        traits = traits_of(func) if isinstance(func, torch._ops.OpOverload) else None
        self[id(func)] = facts = OperatorInfo(
            func=func,
            name=name,
            short_name=short_name,
            traits=traits,
            is_judged=hazards.is_judged(func),
            may_draw=traits is not None and traits.random,
            is_lift=traits is not None and traits.makes_constant,
            is_legal_beside=name.startswith(LEGAL_BESIDE),
        )
        return facts


def sort_out(values: Iterable[Any], scalars: list[Any], tensors: list[torch.Tensor]) -> None:
    """Arguments in order: tensors apart, and all in a form that compares, where a tensor is no more than its kind."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_EXACT:
            scalars.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            scalars.append(kind.__name__)
        elif isinstance(value, list | tuple):
            sort_out(value, scalars, tensors)
        else:
            scalars.append(scalar(value))


def scalar(value: Any) -> Any:
    """A plain argument in a form that compares: NaN equals NaN; what is not plain equals its like."""
    if isinstance(value, float | complex):
        return repr(value)
    return value if isinstance(value, _PLAIN) else type(value).__name__


_TAKES_BOTH = frozenset(
    "_pack_padded_sequence pack_padded_sequence tensor_split ctc_loss _ctc_loss lstm gru rnn_tanh rnn_relu".split()
)
"""Operations that take some of their arguments (lengths, sections) on the host, whatever the others."""


class _Made(NamedTuple):
    """Memory that need not be on the device; ``named`` where the source says that it is on the host."""

    storage: StorageWeakRef
    named: str
    sites: Sites


class Placement:
    """Where one call's tensors lie, as far as that is certain; ``device`` is the memory of inputs and state."""

    def __init__(self, device: Iterable[int]) -> None:
        self._device: set[int | None] = set(device)
        self._made: dict[int | None, _Made] = {}

    def judge(self, name: str, given: Sequence[torch.Tensor]) -> tuple[Refusal, Sites] | None:
        """The refusal of an operation that takes a host's tensor beside the device's, and where that was made.

        A number (no dimensions) is taken by value, as CUDA takes it.
        """
        if not self._made or name in _TAKES_BOTH or not self._touches_device(given):
            return None
        for tensor in given:
            made = self._made.get(storage_key(tensor))
            if made is not None and made.named and tensor.dim() > 0:
                text = f"made on the host by name; {name} takes it beside tensors of the device"
                return Refusal(id="host-data", text=text, operation=made.named), made.sites
        return None

    def remember(self, func: Any, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Take note of where an operation puts its results: with its tensors, or where the source says."""
        if self._touches_device(given):
            self._device.update(map(storage_key, made))
            return
        origin = self._origin(given) if given else _named_host(func, name)
        for tensor in made:
            storage = storage_of(tensor)
            if storage is not None:
                self._made[storage.cdata] = _Made(storage, *origin)

    def _touches_device(self, given: Sequence[torch.Tensor]) -> bool:
        ids = map(storage_key, given)
        return any(id_ in self._device and id_ not in self._made for id_ in ids)

    def _origin(self, given: Sequence[torch.Tensor]) -> tuple[str, Sites]:
        sources = (self._made.get(storage_key(tensor)) for tensor in given)
        named = next((source for source in sources if source is not None and source.named), None)
        return ("", Sites()) if named is None else (named.named, named.sites)


def _named_host(func: Any, name: str) -> tuple[str, Sites]:
    frame = user_frame()
    if frame is None or not names_host(frame, name):
        return "", Sites()
    return str(getattr(func, "overloadpacket", func)), user_sites()


_read_number = torch.Tensor.item  # as it is now: while host reads are watched another stands in its place


class RuleChecker:
    """Judges each operation; remembers which tensors are numbers of Python, and which lie on the host by name."""

    def __init__(self, backend: Backend, device: Iterable[int]) -> None:
        self._is_gpu = backend.kind == "cuda"
        self._placement = None if self._is_gpu else Placement(device)
        self._numbers: dict[int, object] = {}

    def judge(
        self, facts: OperatorInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> tuple[Refusal | None, Sites | None]:
        """What a capture says of an operation, and the line to tell where that is another than the running one."""
        found = hazards.judge(facts.func, args, kwargs, self._is_number) if facts.is_judged else None
        if self._placement is not None:
            is_refused = found is not None and found.level == "error"
            return (found, None) if is_refused else self._placement.judge(facts.short_name, given) or (found, None)
        if found is None:
            return None, None
        # On a GPU an operation on CPU tensors alone is the host's own business: nothing waits for the device. Copying
        # to the device is not.
        is_local = found.id in ("host-sync", "dynamic-shape") or facts.is_lift
        on_host_alone = bool(given) and all(tensor.device.type == "cpu" for tensor in given)
        return (None if is_local and on_host_alone else found), None

    def lift(self, tensor: torch.Tensor) -> Any:
        """Take note of a tensor made from data of the host; its number where it is one, which a graph freezes."""
        storage = storage_of(tensor)
        if tensor.dim() == 0 and storage is not None:
            self._numbers[storage.cdata] = storage
        return number_of(tensor)

    def place(self, facts: OperatorInfo, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Take note of where an operation puts its results."""
        if self._placement is not None:
            self._placement.remember(facts.func, facts.short_name, given, made)

    def _is_number(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._numbers


def number_of(tensor: torch.Tensor) -> Any:
    """The number that a tensor without dimensions holds; None for others."""
    return _read_number(tensor) if tensor.dim() == 0 and storage_key(tensor) is not None else None

"""Where the tensors of one call would lie on CUDA. On a CPU all lie in one place, but their origin tells.

Inputs, parameters and buffers lie on the device, and so does what is computed from them. What a call makes without a
device lies on the host, and so does what is computed from that alone. Other tensors (plain attributes, globals) may
lie on either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph.backends.capture_mode import storage_key, tensors_of
from pytest_cudagraph.hazards import CAPTURE_UNSUPPORTED, UNPINNED_COPY_TEXT, RawFinding
from pytest_cudagraph.hazards.argument_rules import reader
from pytest_cudagraph.sources import user_site, user_sites
from pytest_cudagraph.sources.device_arguments import asked_device, target_device

Place = Literal["device", "host", "kept", "unknown"]
"""``kept``: state that is neither parameter nor buffer, and what is computed from it alone."""

HOST_DRAW_TEXT = "drawn on the host, so every replay uses the numbers of the capture"
_KEPT_TEXT = "this tensor is neither a parameter nor a buffer. The read is legal only if it lies on the host"
_LEFT_TEXT = "{name} is neither a parameter nor a buffer, so that Module.to leaves it on the host"
_TWO_DEVICES_TEXT = "takes this host tensor with tensors of the device. Eager CUDA raises the same"

_TAKES_BOTH = frozenset(
    "_pack_padded_sequence pack_padded_sequence _pad_packed_sequence tensor_split ctc_loss _ctc_loss lstm gru "
    "rnn_tanh rnn_relu narrow".split()
)
"""Operations that take some of their arguments (lengths, sections) on the host."""

_READS_SECOND = frozenset("_pack_padded_sequence tensor_split narrow".split())
"""Operations of which the host reads the second tensor only. Of other operations it may read any."""

_READS = frozenset({"host-sync", "dynamic-shape"})

_HOST_RESULTS: Mapping[str, int] = {"_pack_padded_sequence": 1}
"""The position from which the results lie on the host."""

_INDEXING = frozenset("index _unsafe_index index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
"""Operations that copy an index from the host."""

_COPIES = frozenset({"to", "_to_copy", "type_as", "copy_"})


class _Made(NamedTuple):
    """Memory that the call made on the host or from kept state. The reference keeps its key from reuse."""

    storage: StorageWeakRef
    place: Place
    origin: RawFinding | None = None
    """The line that made it on the host."""
    is_drawn: bool = False
    """Whether it holds random numbers of the host."""
    left_behind: str = ""
    """The name of the attribute that it was computed from, if ``Module.to`` leaves that on the host."""


class Placement:
    """The places of the tensors of one call.

    ``device`` is the memory of inputs, parameters and buffers, and ``kept`` that of other state. ``left_behind`` names
    the part of it that ``Module.to`` leaves on the host, as far as the source tells. ``no_grad`` hides
    ``Tensor.to``. Then, without ``sees_moves``, no operation is refused for tensors of both places.
    """

    def __init__(
        self,
        device: Iterable[int | None],
        kept: Iterable[int | None] = (),
        *,
        left_behind: Mapping[int | None, str] = MappingProxyType({}),
        sees_moves: bool = True,
    ) -> None:
        self._device: set[int | None] = set(device)
        self._left_behind = left_behind
        self._sees_moves = sees_moves
        self._kept = frozenset(kept)
        self._made: dict[int | None, _Made] = {}

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Where a tensor lies."""
        key = storage_key(tensor)
        made = self._made.get(key)
        if made is not None:
            return made.place
        return "device" if key in self._device else "kept" if key in self._kept else "unknown"

    def is_on_host(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether there are tensors, and the call made all of them on the host."""
        return bool(tensors) and all(self.place_of(tensor) == "host" for tensor in tensors)

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor without dimensions is a number of the host, which CUDA takes by value."""
        return self.place_of(tensor) == "host"

    def judged(
        self, found: RawFinding | None, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RawFinding | None:
        """What the finding of the rules in an operation is where its tensors lie, or that it takes tensors of both.

        It has a line only if that is not the running line.
        """
        if found is not None:
            found = self._lifted(found) if name == "lift_fresh" else self._placed(found, name, args, kwargs)
        if not self._sees_moves or (found is not None and found.level == "error"):
            return found
        given = list(tensors_of((args, kwargs)))
        crossing = self._crossing(func, name, args, kwargs, given) if self._made else None
        return crossing or self._forgotten(func, name, args, kwargs, given) or found

    def makes_on_host(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the running operation makes its results on the host: from host tensors, or from nothing."""
        return self.is_on_host(given) if given else asked_device() == "host"

    def may_read(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read this tensor, as far as a CPU can tell."""
        return self.place_of(tensor) in ("host", "kept")

    def read(self, found: RawFinding, name: str, given: Sequence[torch.Tensor]) -> RawFinding | None:
        """What ``found``, a read by the host, is for these tensors: nothing if they lie there."""
        tensors = tensors_read(name, given)
        places = {self.place_of(tensor) for tensor in tensors}
        if not places or places & {"device", "unknown"}:
            return found
        if any(made.is_drawn for made in self._made_of(tensors)):
            return replace(found, id="rng", text=HOST_DRAW_TEXT)
        return replace(found, level="note", text=_KEPT_TEXT) if "kept" in places else None

    def _crossing(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> RawFinding | None:
        """The refusal of an operation that takes host tensors together with tensors of the device.

        A copy and an index are refused at the running line. Any other operation raises on CUDA, at the line that made
        the host tensor. CUDA takes a tensor without dimensions by value.
        """
        if not any(made.place == "host" for made in self._made_of(given)) or name in _TAKES_BOTH:
            return None
        operation = str(getattr(func, "overloadpacket", func))
        if name in _COPIES:
            return self._copy(func, name, args, kwargs, operation)
        if not any(self.place_of(tensor) == "device" for tensor in given):
            return None
        hosts = self._made_of(tensor for tensor in given if tensor.dim() > 0)
        origin = next((made.origin for made in hosts if made.origin is not None), None)
        if origin is None:
            is_drawn = any(made.is_drawn for made in self._made_of(given))
            return RawFinding(id="rng", text=HOST_DRAW_TEXT, operation=operation) if is_drawn else None
        # CUDA takes an index from the host, and no index from the device for a tensor of the host.
        if name in _INDEXING and self.place_of(args[0]) != "host":
            return RawFinding(id="host-data", text=_copy_text(origin), operation=operation)
        return replace(origin, text=_TWO_DEVICES_TEXT, operation=operation)

    def _forgotten(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> RawFinding | None:
        """The warning for an attribute that ``Module.to`` leaves behind, at its first use beside the device."""
        if not self._left_behind or name in _TAKES_BOTH:
            return None
        left = [tensor for tensor in given if self._name_left(tensor)]
        if name in _COPIES and name != "copy_":
            meets_device = _other(args) is not None or _goes_to_device(func, args, kwargs)
        else:
            meets_device = any(self.place_of(tensor) == "device" for tensor in given)
        if not left or not meets_device:
            return None
        text = _LEFT_TEXT.format(name=self._name_left(left[0]))
        for tensor in left:
            self._move(tensor)
        return RawFinding(
            id="host-data", text=text, level="warning", operation=str(getattr(func, "overloadpacket", func))
        )

    def _name_left(self, tensor: torch.Tensor) -> str:
        """The name of what ``Module.to`` leaves behind. Empty also for a number, which CUDA takes by value."""
        if tensor.dim() == 0:
            return ""
        key = storage_key(tensor)
        made = self._made.get(key)
        if made is not None:
            return made.left_behind
        return "" if key in self._device else self._left_behind.get(key, "")

    def _lifted(self, found: RawFinding) -> RawFinding | None:
        """Data of Python that torch makes a tensor. It is copied only if it does not stay on the host."""
        asked = asked_device()
        if asked == "device":
            return replace(found, text=UNPINNED_COPY_TEXT, level="error")
        return None if asked == "host" and found.level == "error" else found

    def _placed(
        self, found: RawFinding, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RawFinding | None:
        given = list(tensors_of((args, kwargs)))
        if found.id in _READS:
            return self.read(found, name, given)
        # The host may draw from any generator.
        return None if found.id == "rng" and not given and asked_device() == "host" else found

    def place(
        self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], *, is_drawn: bool = False
    ) -> None:
        """Note where an operation puts its results. ``is_drawn``: it draws random numbers."""
        if name == "lift_fresh":
            self._place_lifted(made[0])
            return
        keys = [storage_key(tensor) for tensor in given]
        # A storage never moves, and results may be views.
        fresh = [tensor for tensor in made if storage_key(tensor) not in keys]
        if not fresh:
            self._note_draw(made if is_drawn else ())
            return
        if any(key in self._device and key not in self._made for key in keys):
            self._device.update(map(storage_key, fresh))
            if name in _HOST_RESULTS:
                self._make(fresh[_HOST_RESULTS[name] :], "host")
            return
        places = {self.place_of(tensor) for tensor in given}
        if not given:
            self._make_from_nothing(fresh, is_drawn)
        elif places == {"host"} or any(tensor.dim() > 0 and self.place_of(tensor) == "host" for tensor in given):
            hosts = [made for made in self._made_of(given) if made.place == "host"]
            self._make(fresh, "host", hosts[0].origin, is_drawn or any(each.is_drawn for each in hosts))
        elif (left := next(filter(None, map(self._name_left, given)), "")) or "unknown" not in places:
            # CUDA raises where a tensor of an unknown place lies on the device, beside one that was left behind.
            self._make(fresh, "kept", left_behind=left)
        else:  # another storage may have had the same key
            self._device.difference_update(map(storage_key, fresh))

    def _place_lifted(self, tensor: torch.Tensor) -> None:
        """Note where data of Python lies that torch makes a tensor. A number stays on the host."""
        asked = asked_device()
        on_host = asked == "host" or (asked == "unknown" and tensor.dim() == 0)
        if on_host:
            self._make([tensor], "host", _origin())
        else:
            self._device.discard(storage_key(tensor))

    def _copy(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operation: str
    ) -> RawFinding | None:
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], _other(args))
        if not isinstance(source, torch.Tensor) or not source.numel():
            return None
        to_device = _goes_to_device(func, args, kwargs) if target is None else self.place_of(target) == "device"
        made = self._made.get(storage_key(source))
        if made is not None and made.place == "host" and to_device:
            self._move(source)
            return RawFinding(id="host-data", text=_copy_text(made.origin), operation=operation)
        if target is not None and (self.place_of(source), self.place_of(target)) == ("device", "host"):
            return RawFinding(id="host-sync", text=CAPTURE_UNSUPPORTED.text, operation=operation)
        return None

    def _move(self, tensor: torch.Tensor) -> None:
        # On a CPU the copy is the same tensor. From here on it stands for the one on the device.
        key = storage_key(tensor)
        self._made.pop(key, None)
        self._device.add(key)

    def _made_of(self, tensors: Iterable[torch.Tensor]) -> Iterable[_Made]:
        made = (self._made.get(storage_key(tensor)) for tensor in tensors)
        return (each for each in made if each is not None)

    def _note_draw(self, written: Iterable[torch.Tensor]) -> None:
        for key in map(storage_key, written):
            made = self._made.get(key)
            if made is not None:
                self._made[key] = made._replace(is_drawn=made.place == "host")

    def _make_from_nothing(self, tensors: Sequence[torch.Tensor], is_drawn: bool) -> None:
        if asked_device() == "host":
            self._make(tensors, "host", _origin(), is_drawn)
        else:
            self._device.difference_update(map(storage_key, tensors))

    def _make(
        self,
        tensors: Iterable[torch.Tensor],
        place: Place,
        origin: RawFinding | None = None,
        is_drawn: bool = False,
        left_behind: str = "",
    ) -> None:
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None:
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._made[key] = _Made(storage, place, origin, is_drawn, left_behind)


def tensors_read(name: str, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that the host may read in an operation that reads any."""
    return given[1:2] if name in _READS_SECOND else given


def _origin() -> RawFinding:
    return RawFinding(id="host-data", text=UNPINNED_COPY_TEXT, **user_sites()._asdict())


def _copy_text(origin: RawFinding | None) -> str:
    site = None if origin is None else origin.site
    return UNPINNED_COPY_TEXT if site is None or site == user_site() else f"{UNPINNED_COPY_TEXT} It was made at {site}"


def _other(args: tuple[Any, ...]) -> torch.Tensor | None:
    other = args[1] if len(args) > 1 else None
    return other if isinstance(other, torch.Tensor) else None


def _goes_to_device(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return _device_reader(func)(args, kwargs) is not None and target_device() != "host"


@functools.cache
def _device_reader(func: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    return reader(func, "device")

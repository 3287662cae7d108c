"""What the dispatcher cannot see: reads by the host, seeds, raw addresses, tensors assigned anew.

The methods of :class:`torch.Tensor` and the functions of :mod:`torch` themselves are replaced while a pass runs, and
always put back. A ``TorchFunctionMode`` would see the same, but it switches fused fast paths off.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.hazards import CAPTURE_UNSUPPORTED, RNG_STATE_TEXT, UNPINNED_COPY_TEXT
from pytest_cudagraph.sources import origin_of, user_frame, user_site, user_sites
from pytest_cudagraph.sources.syntax import branches_on_cuda, is_host, names_host
from pytest_cudagraph.values import Level, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """One call that the dispatcher does not see."""

    id: str
    operation: str
    text: str
    site: Site | None
    level: Level = "error"
    called_from: Site | None = None


HostCallRule = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[str, str, Level] | None"]

_UPLOAD: tuple[str, str, Level] = ("host-data", UNPINNED_COPY_TEXT, "error")
_MISSING = object()


@dataclass(slots=True, kw_only=True)
class HostCallWatch:
    """Collects sightings while :meth:`watching`; ``on_gpu`` when only what touches CUDA tensors counts.

    ``as_on_gpu`` lets a model on a CPU take the branches that it takes on a GPU.
    """

    on_gpu: bool
    as_on_gpu: bool = False
    host_calls: list[HostCall] = field(default_factory=list)
    gpu_branches: list[Site] = field(default_factory=list)
    """Where the model branched on ``is_cuda``, which was false."""
    _thread: int = field(default_factory=threading.get_ident)
    _is_inside: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace the methods; put every one of them back, also after an exception."""
        with ExitStack() as stack:
            for name, judge in self._methods().items():
                stack.enter_context(_replaced(torch.Tensor, name, self._around(f"Tensor.{name}", judge)))
            for owner, label, names, judge in self._functions():
                for name in names:
                    if hasattr(owner, name):
                        stack.enter_context(_replaced(owner, name, self._around(f"{label}.{name}", judge)))
            stack.enter_context(_replaced(torch.Tensor, "data", self._data_property))
            stack.enter_context(_replaced(torch.Tensor, "is_cuda", self._is_cuda_property))
            stack.enter_context(_replaced(nn.Module, "__setattr__", self._around("assignment", _assignment)))
            yield

    def _methods(self) -> dict[str, HostCallRule]:
        reads = ("tolist", "numpy", "__array__", "cpu", "__repr__", "__format__")
        # The dispatcher sees these too, but for those inside an operator that is written in Python.
        numbers = ("item", "__bool__", "__float__", "__int__", "__index__", "__complex__")
        return {
            **dict.fromkeys((*reads, *numbers), self._read),
            "to": self._move,
            "data_ptr": self._address,
            "pin_memory": _sync,
            "new_tensor": self._new_tensor,
        }

    def _functions(self) -> Iterator[tuple[Any, str, tuple[str, ...], HostCallRule]]:
        seeds = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
        # On a GPU the last three touch the host's generator alone, which a capture leaves in peace.
        of_any_device = seeds[:2] if self.on_gpu else seeds
        yield torch, "torch", of_any_device, _seed
        yield torch.random, "torch.random", of_any_device, _seed
        yield torch.cuda, "torch.cuda", (*seeds, "manual_seed_all", "seed_all"), _seed
        yield torch.cuda, "torch.cuda", ("synchronize",), _sync
        yield getattr(torch, "accelerator", None), "torch.accelerator", ("synchronize",), _sync
        yield torch.cuda.Event, "torch.cuda.Event", ("synchronize", "query"), _sync
        yield torch.cuda.Stream, "torch.cuda.Stream", ("synchronize", "query"), _sync
        yield torch, "torch", ("tensor", "as_tensor"), self._number_on_device

    def _around(self, label: str, judge: HostCallRule) -> Callable[[Any], Any]:
        def replace(original: Any) -> Any:
            @functools.wraps(original)
            def watched(*args: Any, **kwargs: Any) -> Any:
                if self._is_inside or threading.get_ident() != self._thread:
                    return original(*args, **kwargs)
                # What a watched call does inside (repr reads numbers one by one) is that one call.
                self._is_inside = True
                try:
                    self._note(label, judge(args, kwargs))
                finally:
                    self._is_inside = False
                return self._run(original, args, kwargs, is_read=judge is not _assignment)

            return watched

        return replace

    def _run(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_read: bool) -> Any:
        self._is_inside = is_read
        try:
            return original(*args, **kwargs)
        finally:
            self._is_inside = False

    def _note(self, label: str, found: tuple[str, str, Level] | None) -> None:
        if found is not None:
            hazard, text, level = found
            site, called_from = user_sites()
            sighting = HostCall(id=hazard, operation=label, text=text, level=level, site=site, called_from=called_from)
            self.host_calls.append(sighting)

    def _data_property(self, original: Any) -> property:
        def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if not self._is_inside and threading.get_ident() == self._thread:
                self._note("Tensor.data", ("rebinds-state", "another tensor is put in its place", "error"))
            original.__set__(tensor, value)

        return property(original.__get__, assign)

    def _is_cuda_property(self, original: Any) -> property:
        def is_cuda(tensor: torch.Tensor) -> bool:
            found = bool(original.__get__(tensor))
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            is_asked = not found and not self.on_gpu and origin_of(code.co_filename) != "machinery"
            if not is_asked or not branches_on_cuda(code, line):
                return found
            self.gpu_branches.append(Site(file=code.co_filename, line=line, function=code.co_name))
            return self.as_on_gpu

        return property(is_cuda)

    def _counts(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and (not self.on_gpu or tensor.is_cuda)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
        return _sync(args, kwargs) if self._counts(args[0]) else None

    def _move(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
        wanted = [*args[1:2], kwargs.get("device")]
        if not any(map(is_host, wanted)) or not self._counts(args[0]):
            return None
        # A device that a variable holds may on a CPU be the model's own; one that is written out is the host.
        frame = user_frame()
        is_meant = self.on_gpu or (frame is not None and names_host(frame, "to"))
        return _sync(args, kwargs) if is_meant else None

    def _new_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
        return _UPLOAD if self._counts(args[0]) else None

    def _number_on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
        # A number without a device stays on the host, where CUDA takes it by value; with the device of a tensor it
        # is copied there. Lists and arrays are seen by the dispatcher either way.
        source, device = (args or (None,))[0], kwargs.get("device")
        is_empty = isinstance(source, list | tuple) and not source
        if not isinstance(device, torch.device) or isinstance(source, torch.Tensor) or is_empty:
            return None
        return None if self.on_gpu and device.type == "cpu" else _UPLOAD

    def _address(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
        # torch compares addresses in its own code (RNN weights); only a user's line can branch on one.
        caller = _first_frame_outside(__file__)
        site = user_site()
        is_direct = site is not None and caller == (site.file, site.line)
        return ("unknown-op", "what is done with the address is not recorded", "note") if is_direct else None


def _sync(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
    return ("host-sync", CAPTURE_UNSUPPORTED.text, "error")


def _seed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
    return ("rng", RNG_STATE_TEXT, "error")


def _assignment(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, Level] | None:
    module, name, value = args
    held = {**module.__dict__.get("_parameters", {}), **module.__dict__.get("_buffers", {})}
    is_rebound = isinstance(held.get(name), torch.Tensor) and value is not held[name]
    return ("rebinds-state", f"{name} is given another tensor", "error") if is_rebound else None


def _first_frame_outside(own_file: str) -> tuple[str, int] | None:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == own_file and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    own = vars(owner).get(name, _MISSING)
    original = getattr(owner, name)
    setattr(owner, name, replace(original))
    try:
        yield
    finally:
        if own is _MISSING:
            # Inherited from a base class: taking ours away uncovers it again.
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def as_if_capturing() -> Iterator[None]:
    """Let libraries that ask ``torch.cuda.is_current_stream_capturing`` take the branch they take under capture."""
    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.graphs):
            stack.enter_context(_replaced(module, "is_current_stream_capturing", lambda original: lambda: True))
        yield

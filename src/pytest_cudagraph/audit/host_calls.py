"""Watches Python calls that the dispatcher does not show: host reads, seeds, addresses, assigned tensors."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import state
from pytest_cudagraph.audit.trace import Trace
from pytest_cudagraph.backends.capture_mode import (
    RefusedCall,
    Replacement,
    moves_to_host,
    refused_calls,
    replaced,
    sends_number,
)
from pytest_cudagraph.backends.placement import Placement
from pytest_cudagraph.hazards import UNPINNED_COPY_TEXT, RawFinding
from pytest_cudagraph.sources import is_in_higher_order_operator, origin_of, user_site, user_sites
from pytest_cudagraph.sources.syntax import branches_on_cuda
from pytest_cudagraph.values import Site

HostCallRule = Callable[..., "RawFinding | None"]
"""Takes the arguments of a call."""

# The dispatcher shows these calls too, except inside an operator that is written in Python.
_NUMBERS = ("item", "__bool__", "__float__", "__int__", "__index__", "__complex__")
_UPLOAD = RawFinding(id="host-data", text=UNPINNED_COPY_TEXT)


@dataclass(slots=True, kw_only=True)
class HostCallWatch:
    """Adds findings to ``trace`` inside :meth:`watching`. ``placement`` knows where tensors lie. It is None on a GPU.

    With ``as_on_gpu`` a model on a CPU takes the branches that it takes on a GPU.
    """

    placement: Placement | None
    trace: Trace
    as_on_gpu: bool = False
    gpu_branches: list[Site] = field(default_factory=list)
    """Lines where the model branched on ``is_cuda``, which was false."""
    _thread: int = field(default_factory=threading.get_ident)
    _is_inside: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace functions of torch. Put all of them back at the end, also after an exception."""
        with replaced(self._replacements()):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: an observer may read tensors."""
        outer, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = outer

    def _replacements(self) -> Iterator[Replacement]:
        numbers = (RefusedCall(torch.Tensor, "Tensor", name, is_legal_on_host=True) for name in _NUMBERS)
        for call in (*refused_calls(), *numbers):
            yield self._around(call.owner, call.name, call.label, functools.partial(self._refused, call))
        yield self._around(torch.Tensor, "data_ptr", "Tensor.data_ptr", self._address)
        yield self._around(torch.Tensor, "new_tensor", "Tensor.new_tensor", self._new_tensor)
        yield self._around(nn.Module, "__setattr__", "assignment", _assignment)
        yield torch.Tensor, "data", self._data_property
        yield torch.Tensor, "is_cuda", self._is_cuda_property

    def _around(self, owner: Any, name: str, label: str, rule: HostCallRule) -> Replacement:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def watched(*args: Any, **kwargs: Any) -> Any:
                if not self._is_listening():
                    return original(*args, **kwargs)
                # A watched call may make others: repr reads numbers one by one. Only the outer call counts.
                self._is_inside = True
                try:
                    self._note(label, rule(*args, **kwargs))
                    self._is_inside = rule is not _assignment
                    return original(*args, **kwargs)
                finally:
                    self._is_inside = False

            return watched

        return owner, name, make

    def _is_listening(self) -> bool:
        return not self._is_inside and threading.get_ident() == self._thread

    def _note(self, label: str, found: RawFinding | None) -> None:
        if found is not None:
            site, called_from = user_sites()
            raw = replace(found, operation=label, site=site, called_from=called_from)
            self.trace.host_calls.append((len(self.trace.operations), raw))

    def _data_property(self, original: Any) -> property:
        def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if self._is_listening() and not _is_same_memory(tensor, value):
                self._note("Tensor.data", RawFinding(id="rebinds-state", text="another tensor takes its place"))
            original.__set__(tensor, value)

        return property(original.__get__, assign)

    def _is_cuda_property(self, original: Any) -> property:
        def is_cuda(tensor: torch.Tensor) -> bool:
            found = bool(original.__get__(tensor))
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            is_asked = not found and self.placement is not None and origin_of(code.co_filename) != "machinery"
            if not is_asked or not branches_on_cuda(code, line):
                return found
            self.gpu_branches.append(Site(file=code.co_filename, line=line, function=code.co_name))
            return self.as_on_gpu

        return property(is_cuda)

    def _read(self, tensor: Any, found: RawFinding) -> RawFinding | None:
        """What a read of this value is: nothing if it lies on the host."""
        if not isinstance(tensor, torch.Tensor):
            return None
        if self.placement is not None:
            return self.placement.read(found, "", [tensor])
        return found if tensor.is_cuda else None

    def _refused(self, call: RefusedCall, *args: Any, **kwargs: Any) -> RawFinding | None:
        if call.name == "to" and not moves_to_host(args, kwargs, by_name=self.placement is not None):
            return None
        if call.hazard == "host-data" and not sends_number(*args, **kwargs, by_name=self.placement is not None):
            return None
        if call.hazard == "rng" and is_in_higher_order_operator():
            return None
        found = RawFinding(id=call.hazard, text=call.text)
        if call.is_legal_on_host and call.hazard == "host-sync":
            return self._read(args[0] if args else None, found)
        return None if call.is_legal_on_host and self.placement is None else found

    def _new_tensor(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> RawFinding | None:
        return self._read(tensor, _UPLOAD)

    def _address(self, *args: Any, **kwargs: Any) -> RawFinding | None:
        # torch compares addresses in its own code (RNN weights). Only a line of the user can branch on one.
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        site = user_site()
        if site is None or (frame.f_code.co_filename, frame.f_lineno) != (site.file, site.line):
            return None
        return RawFinding(id="unknown-op", text="the graph does not record what happens to the address", level="note")


def _assignment(module: nn.Module, name: str, value: Any) -> RawFinding | None:
    held = {**module.__dict__.get("_parameters", {}), **module.__dict__.get("_buffers", {})}
    is_rebound = isinstance(held.get(name), torch.Tensor) and not _is_same_memory(held[name], value)
    return RawFinding(id="rebinds-state", text=f"{name} becomes another tensor") if is_rebound else None


def _is_same_memory(tensor: torch.Tensor, value: Any) -> bool:
    """Whether an assignment changes nothing for a graph, as that of ``Module.to`` on the device where it is."""
    if value is tensor or not isinstance(value, torch.Tensor):
        return value is tensor
    both = (tensor, value)
    return all(map(state.is_addressable, both)) and state.layout_of(tensor) == state.layout_of(value)

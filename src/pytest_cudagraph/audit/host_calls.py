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

from pytest_cudagraph.backends.capture_mode import RefusedCall, Replacement, moves_to_host, refused_calls, replaced
from pytest_cudagraph.hazards import UNPINNED_COPY_TEXT, RawFinding
from pytest_cudagraph.sources import origin_of, user_site, user_sites
from pytest_cudagraph.sources.syntax import branches_on_cuda
from pytest_cudagraph.values import Site

HostCallRule = Callable[..., "RawFinding | None"]
"""Takes the arguments of a call."""

# The dispatcher shows these calls too, except inside an operator that is written in Python.
_NUMBERS = ("item", "__bool__", "__float__", "__int__", "__index__", "__complex__")
_UPLOAD = RawFinding(id="host-data", text=UNPINNED_COPY_TEXT)


@dataclass(slots=True, kw_only=True)
class HostCallWatch:
    """Collects findings inside :meth:`watching`. ``on_gpu``: only calls that touch CUDA tensors count.

    With ``as_on_gpu`` a model on a CPU takes the branches that it takes on a GPU.
    """

    on_gpu: bool
    as_on_gpu: bool = False
    found: list[RawFinding] = field(default_factory=list)
    gpu_branches: list[Site] = field(default_factory=list)
    """Lines where the model branched on ``is_cuda``, which was false."""
    _thread: int = field(default_factory=threading.get_ident)
    _is_inside: bool = False
    _numbers: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that the call made from Python numbers, by ``id``. They lie on the host."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace functions of torch. Put all of them back at the end, also after an exception."""
        with replaced(self._replacements()):
            yield

    def _replacements(self) -> Iterator[Replacement]:
        numbers = (RefusedCall(torch.Tensor, "Tensor", name, is_legal_on_host=True) for name in _NUMBERS)
        for call in (*refused_calls(), *numbers):
            yield self._around(call.owner, call.name, call.label, functools.partial(self._refused, call))
        yield self._around(torch.Tensor, "data_ptr", "Tensor.data_ptr", self._address)
        yield self._around(torch.Tensor, "new_tensor", "Tensor.new_tensor", self._new_tensor)
        for name in ("tensor", "as_tensor"):
            yield self._around(torch, name, f"torch.{name}", self._number_on_device, self._remember_number)
        yield self._around(nn.Module, "__setattr__", "assignment", _assignment)
        yield torch.Tensor, "data", self._data_property
        yield torch.Tensor, "is_cuda", self._is_cuda_property

    def _around(
        self, owner: Any, name: str, label: str, rule: HostCallRule, then: Callable[..., None] = lambda *_, **__: None
    ) -> Replacement:
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
                    result = original(*args, **kwargs)
                    then(result, *args, **kwargs)
                    return result
                finally:
                    self._is_inside = False

            return watched

        return owner, name, make

    def _is_listening(self) -> bool:
        return not self._is_inside and threading.get_ident() == self._thread

    def _note(self, label: str, found: RawFinding | None) -> None:
        if found is not None:
            site, called_from = user_sites()
            self.found.append(replace(found, operation=label, site=site, called_from=called_from))

    def _data_property(self, original: Any) -> property:
        def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if self._is_listening():
                self._note("Tensor.data", RawFinding(id="rebinds-state", text="another tensor takes its place"))
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
        return not self.on_gpu or (isinstance(tensor, torch.Tensor) and tensor.is_cuda)

    def _refused(self, call: RefusedCall, *args: Any, **kwargs: Any) -> RawFinding | None:
        if call.is_legal_on_host and not self._counts(args[0] if args else None):
            return None
        if call.name == "to" and not moves_to_host(args, kwargs, by_name=not self.on_gpu):
            return _UPLOAD if self._sends_number(*args, **kwargs) else None
        return RawFinding(id=call.hazard, text=call.text)

    def _sends_number(self, tensor: Any, target: Any = None, *args: Any, **kwargs: Any) -> bool:
        # On a CPU the device of a tensor stands for the GPU. On a GPU the dispatcher shows the copy.
        places = (target, kwargs.get("device"), kwargs.get("other"))
        return id(tensor) in self._numbers and any(isinstance(place, torch.device | torch.Tensor) for place in places)

    def _remember_number(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if not self.on_gpu and kwargs.get("device") is None and result.dim() == 0:
            self._numbers[id(result)] = result

    def _new_tensor(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> RawFinding | None:
        return _UPLOAD if self._counts(tensor) else None

    def _number_on_device(self, source: Any = None, *args: Any, **kwargs: Any) -> RawFinding | None:
        # Without a device a number stays on the host, and CUDA takes it by value. With the device of a tensor torch
        # copies it there. The dispatcher shows lists and arrays in both cases.
        device = kwargs.get("device")
        is_empty = isinstance(source, list | tuple) and not source
        if not isinstance(device, torch.device) or isinstance(source, torch.Tensor) or is_empty:
            return None
        return None if self.on_gpu and device.type == "cpu" else _UPLOAD

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
    is_rebound = isinstance(held.get(name), torch.Tensor) and value is not held[name]
    return RawFinding(id="rebinds-state", text=f"{name} becomes another tensor") if is_rebound else None

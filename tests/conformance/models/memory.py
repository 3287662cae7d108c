"""Memory that is not the graph's: made by another thread, forgotten after the capture, written by stealth."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from tests.conformance.cases import Base, clean, hazard, note


def in_another_thread(work):
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()


@hazard(12, audit="foreign-tensor", capture="foreign-tensor")
class WorkInAThread(Base):
    def forward(self, x):
        answers = []
        in_another_thread(lambda: answers.append(x * 2))
        return self.linear(x) + answers[0]  # HERE


@hazard(12, audit="foreign-tensor", capture="foreign-tensor", notes=("stateful-python",))
class WorkInAThreadKept(Base):
    """The memory stays, so that a replay reads the answer of the capture for ever."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def forward(self, x):
        in_another_thread(lambda: self.answers.update(last=x * 2))
        return self.linear(x) + self.answers["last"]  # HERE


@clean()
class ThreadThatComputesNothingOfIt(Base):
    def forward(self, x):
        in_another_thread(lambda: torch.ones(4).sum())
        return self.linear(x)


@hazard(31, check="rebinds-state")
class TableForgottenLater(Base):
    def __init__(self):
        super().__init__()
        self.table = torch.full((4,), 2.0, device=self.linear.weight.device)

    def forward(self, x):
        return self.linear(x) if self.table is None else self.linear(x) * self.table

    def after_capture(self):
        self.table = None


@clean()
class TableSharedWithAnother(Base):
    """One of two names goes; the memory stays, and so does what is read there."""

    def __init__(self):
        super().__init__()
        self.table = self.other = torch.full((4,), 2.0, device=self.linear.weight.device)

    def forward(self, x):
        return self.linear(x) * self.other

    def after_capture(self):
        self.table = None


def write_nan(tensor):
    """As C code does that gets an address. NumPy does not take a tensor on a GPU."""
    nan = np.full(1, np.nan, np.float32)
    ctypes.memmove(np.from_dlpack(tensor).ctypes.data, nan.ctypes.data, nan.nbytes)


@hazard(22, capture="hidden-write")
class HiddenWrite(Base):
    def forward(self, x):
        y = self.linear(x)
        write_nan(y)
        return y.argmax(-1)  # HERE


@hazard(22, capture="hidden-write")
class HiddenWriteOfOutput(Base):
    def forward(self, x):
        y = self.linear(x)
        write_nan(y)
        return y


@hazard(22, capture="hidden-write")
class HiddenWriteOfInput(Base):
    def forward(self, x):
        write_nan(x)
        return self.linear(x)  # HERE


@hazard(22, capture="hidden-write")
class HiddenSort(Base):
    """The same values in another order."""

    def forward(self, x):
        y = self.linear(x)
        view = np.from_dlpack(y)
        ordered = np.sort(view)
        ctypes.memmove(view.ctypes.data, ordered.ctypes.data, ordered.nbytes)
        return y + 1  # HERE


@clean(notes=("host-data",))
class HostWritesItsOwn(Base):
    """The host may write to its own tensor. The graph keeps the number."""

    def forward(self, x):
        scale = torch.tensor(2.0)  # HERE
        write_nan(scale)
        return torch.nan_to_num(self.linear(x) * scale)


@clean()
class WritesThroughViews(Base):
    def forward(self, x):
        y = torch.empty(*x.shape, 2, device=x.device)
        y[..., 0] = x
        y.select(-1, 1).copy_(self.linear(x))
        torch.add(y, 1, out=y)
        y.view(-1)[:2].clamp_(min=0)
        return y.flatten(1).sort(-1)[0]


LIBRARY = torch.library.Library("cudagraph_conformance", "FRAGMENT")
LIBRARY.define("stealthy(Tensor x, Tensor state) -> Tensor")
LIBRARY.impl("stealthy", lambda x, state: x * state.add_(1), "CompositeExplicitAutograd")


@note(22, ids=("unknown-op",))
class UndeclaredWrite(Base):
    """Its schema tells of no write: whether it makes one is not judged."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        return torch.ops.cudagraph_conformance.stealthy(x, self.steps)  # HERE


class Logged(torch.Tensor):
    """A subclass in Python alone, as users make them to log what is called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@clean()
class SubclassInPython(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.full((4,), 2.0, device=self.linear.weight.device).as_subclass(Logged)

    def forward(self, x):
        return (self.linear(x) * self.scale).as_subclass(torch.Tensor)

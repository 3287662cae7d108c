"""Memory that is not the graph's: made by another thread, forgotten after the capture, written by stealth."""

from __future__ import annotations

import threading

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
        self.table = torch.full((4,), 2.0)

    def forward(self, x):
        return self.linear(x) if self.table is None else self.linear(x) * self.table

    def after_capture(self):
        self.table = None


@clean()
class TableSharedWithAnother(Base):
    """One of two names goes; the memory stays, and so does what is read there."""

    def __init__(self):
        super().__init__()
        self.table = self.other = torch.full((4,), 2.0)

    def forward(self, x):
        return self.linear(x) * self.other

    def after_capture(self):
        self.table = None


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
        self.scale = torch.full((4,), 2.0).as_subclass(Logged)

    def forward(self, x):
        return (self.linear(x) * self.scale).as_subclass(torch.Tensor)

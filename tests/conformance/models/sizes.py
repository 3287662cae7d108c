"""What a model makes anew when another batch size comes: caches, such as the anchors of YOLOv8, and state."""

from __future__ import annotations

import torch
from tests.conformance.cases import Base, clean, hazard

OTHERS = []
"""Tensors that are not the model's."""


class PerSize(Base):
    """Calls :meth:`prepare` when the batch size differs from that of the last call."""

    size = None

    def prepare(self, x):
        self.anchors = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)[:, None] + 1

    def forward(self, x):
        if self.size != x.shape[0]:
            self.prepare(x)
            self.size = x.shape[0]
        return self.answer(x)

    def answer(self, x):
        return self.linear(x) + self.anchors


@clean()
class AnchorsPerSize(PerSize):
    pass


@clean()
class AnchorsFromTheHostPerSize(PerSize):
    """As YOLOv8: a capture follows the first call at its size, so it does not come to this copy."""

    def prepare(self, x):
        self.anchors = torch.arange(x.shape[0]).type_as(x)[:, None] + 1


class BufferPerSize(PerSize):
    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.zeros(1), persistent=False)


@clean()
class BufferOfAnchorsPerSize(BufferPerSize):
    pass


@clean()
class MaskWithoutWeightsPerSize(BufferPerSize):
    """No parameter: the check changes the cache itself in place, and the graph must read that one."""

    def __init__(self):
        super().__init__()
        del self.linear

    def answer(self, x):
        return x * self.anchors


@clean(notes=("mutates-state",))
class WorkspacePerSize(BufferPerSize):
    """Written by each call, before it is read."""

    def answer(self, x):
        self.anchors.copy_(x[:, :1])  # HERE
        return self.linear(x) * self.anchors


@clean()
class AnchorsOfOtherSizesLater(BufferPerSize):
    """Calls at other sizes drop the cache that a graph reads, and other tensors would take its memory."""

    def after_capture(self):
        made = [self(torch.ones(size, 4, device=self.linear.weight.device)) for size in (3, 2)]
        OTHERS[:] = [torch.full_like(self.anchors, 9.0) for _ in range(8)] + made


@hazard(27, check="rebinds-state", notes=("mutates-state",))
class MemoryClearedPerSize(BufferPerSize):
    """Eager begins anew after a call at another size. A replay goes on."""

    def prepare(self, x):
        self.anchors = x.new_zeros(x.shape[0], 4)

    def answer(self, x):
        self.anchors.mul_(0.5).add_(x)  # HERE
        return self.linear(self.anchors)


@hazard(27, check="rebinds-state")
class MeanOfTheFirstInputsPerSize(BufferPerSize):
    """The first inputs at a size decide about all later ones."""

    def prepare(self, x):
        self.anchors = x.mean(0)


@hazard(31, check="rebinds-state")
class AnchorsReplacedLater(BufferPerSize):
    def after_capture(self):
        self.anchors = self.anchors * 2

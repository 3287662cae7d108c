"""What is captured and replayed as the CUDA programmer would expect, and is still worth a note."""

from __future__ import annotations

import random

import torch
from tests.conformance.cases import Base, note
from torch import nn

GLOBAL_TENSOR = torch.ones(4)


@note(27, ids=())
class FirstCallIsDifferent(Base):
    scale = 2.0

    def forward(self, x):
        y = x * self.scale
        self.scale = 1.0
        return y


@note(27, ids=())
class FirstCallBranch(Base):
    is_first = True

    def forward(self, x):
        y = self.linear(x) if self.is_first else x + 1
        self.is_first = False
        return y


@note(27, ids=())
class Lazy(Base):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
        return x * self.table


@note(35, ids=("mutates-state",))
class BufferInPlace(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)  # HERE
        return x * self.steps


@note(35, ids=("mutates-state",))
class CacheWithOnePlaceLeft(Base):
    """A second call from where the first one left the position raises: on CUDA it ends the device's work."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 3, 4))
        self.position = torch.tensor([2], device=self.keys.device)

    def forward(self, x):
        keys = self.keys[: x.shape[0]]
        keys.index_copy_(1, self.position, self.linear(x)[:, None])  # HERE
        self.position.add_(1)  # HERE
        return keys.sum(1)


@note(35, ids=("mutates-state",))
class AverageThroughData(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        self.average.data.mul_(0.9).add_(x.mean(0))  # HERE
        return x - self.average


@note(35, ids=("mutates-state",))
class BatchNormTraining(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm.train()(x)  # HERE


@note(38, ids=("mutates-state",))
class CacheByDevicePosition(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.cache.index_copy_(0, self.position, x[:1])  # HERE
        self.position.add_(1)  # HERE
        return x + self.cache.sum(0)


@note(36, ids=("mutates-input",))
class InputInPlace(Base):
    def forward(self, x):
        x.add_(1)  # HERE
        return self.linear(x)


@note(34, ids=("output-alias",))
class InputView(Base):
    def forward(self, x):
        return x.view(-1), self.linear(x)


@note(34, ids=("output-alias",))
class ParameterReturned(Base):
    def forward(self, x):
        return self.linear(x), self.linear.weight


@note(37, ids=("stateful-python",))
class Appends(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return self.linear(x)


@note(45, ids=("stateful-python",))
class CountingHook(Base):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(self.count)

    def count(self, module, args, output):
        self.calls += 1

    def forward(self, x):
        return self.linear(x)


@note(21, ids=("foreign-tensor",))
class GlobalTensor(Base):
    def forward(self, x):
        return x * GLOBAL_TENSOR  # HERE


@note(42, ids=("rng",))
class DropoutTraining(Base):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)  # HERE


@note(22, ids=("unknown-op",))
class CustomOperator(Base):
    def forward(self, x):
        return torch.ops.cudagraph_conformance.twice(x)  # HERE


LIBRARY = torch.library.Library("cudagraph_conformance", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


@note(22, ids=("unknown-op",))
class Address(Base):
    def forward(self, x):
        x.data_ptr()  # HERE
        return self.linear(x)


@note(20, 30, ids=())
class AutocastInside(Base):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.linear(self.linear(x)).float()


@note(26, ids=("rng",))
class RareRandomBranch(Base):
    """No call takes the branch, and the generator moves all the same."""

    def forward(self, x):
        if random.random() > 2:
            return x + 1
        return self.linear(x)

"""One tiny module per hazard. The line a finding must point at ends with ``# here``."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

GLOBAL_CALLS = [0]
GLOBAL_TENSOR = torch.ones(4)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class BranchOnValue(Base):
    def forward(self, x):
        if x.sum() > 0:  # here
            return self.linear(x)
        return x


class Item(Base):
    def forward(self, x):
        return x * x.max().item()  # here


class ToList(Base):
    def forward(self, x):
        return x * sum(x[0].tolist())  # here


class Numpy(Base):
    def forward(self, x):
        return x * float(x.numpy()[0, 0])  # here


class AsArray(Base):
    def forward(self, x):
        return x * float(np.asarray(x).sum())  # here


class ToCpu(Base):
    def forward(self, x):
        return self.linear(x.cpu())  # here


class ToCpuByName(Base):
    def forward(self, x):
        return self.linear(x.to("cpu"))  # here


class Printing(Base):
    def forward(self, x):
        str(x)  # here
        return self.linear(x)


class Equal(Base):
    def forward(self, x):
        return x if torch.equal(x, self.linear(x)) else -x  # here


class Inverse(Base):
    def forward(self, x):
        return torch.linalg.inv(torch.eye(4) + x.T @ x)  # here


class SliceBound(Base):
    def forward(self, x):
        return x[: x.argmax()]  # here


class MaskRead(Base):
    def forward(self, x):
        return x[x > 0]  # here


class MaskWrite(Base):
    def forward(self, x):
        y = x.clone()
        y[x > 0] = x[0, 0]  # here
        return y


class NonZero(Base):
    def forward(self, x):
        return x.nonzero()  # here


class RepeatInterleave(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("repeats", torch.tensor([1, 2]))

    def forward(self, x):
        return x.repeat_interleave(self.repeats, 0)  # here


class HostList(Base):
    def forward(self, x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])  # here


class ListIndex(Base):
    def forward(self, x):
        return x[:, [0, 2]]  # here


class NumberAtIndices(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.tensor([0, 1]))

    def forward(self, x):
        y = x.clone()
        y[self.index] = 0.0  # here
        return y


class NumberOnDevice(Base):
    def forward(self, x):
        return x * torch.tensor(2.0, device=x.device)  # here


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.rand(4, generator=self.generator)  # here


class Reseeding(Base):
    def forward(self, x):
        torch.manual_seed(0)  # here
        return x + torch.rand(4)


class RngState(Base):
    def forward(self, x):
        torch.get_rng_state()  # here
        return self.linear(x)


class Counter(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps % 2:
            return self.linear(x)  # here
        return x + 1  # here


class Temperature(Base):
    scale = 1.0

    def forward(self, x):
        self.scale *= 0.5
        return x * self.scale  # here


class GlobalCounter(Base):
    def forward(self, x):
        GLOBAL_CALLS[0] += 1
        return x * GLOBAL_CALLS[0]  # here


class PythonRandom(Base):
    def forward(self, x):
        return x * random.random()  # here


class NumpyRandom(Base):
    def forward(self, x):
        return x * float(np.random.rand())  # here


class WallClock(Base):
    def forward(self, x):
        return x * time.perf_counter()  # here


class NumberMadeTensor(Base):
    def forward(self, x):
        GLOBAL_CALLS[0] += 1
        return x * torch.tensor(float(GLOBAL_CALLS[0]))  # here


class ParameterData(Base):
    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 2  # here
        return self.linear(x)


class BufferReassigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total = self.total + x.sum(0)  # here
        return x + self.total


class GrowingCache(Base):
    cache = None

    def forward(self, x):
        self.cache = x if self.cache is None else torch.cat([self.cache, x])  # here
        return self.cache.sum(0)


class CachePosition(Base):
    position = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x):
        self.cache[self.position] = x[0]  # here
        self.position += 1
        return self.cache.sum(0) + x


class Lazy(Base):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)  # here
        return x * self.table


class Unseen(Base):
    def forward(self, x):
        return x * float(np.from_dlpack(x)[0, 0])  # here


class FreshNumpy(Base):
    def forward(self, x):
        return x * torch.frombuffer(bytearray(np.ones(4, np.float32).tobytes()), dtype=torch.float32)  # here


class BufferInPlace(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)  # here
        return x * self.steps


class NumpyWrite(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.view = self.total.numpy()

    def forward(self, x):
        self.view += 1
        return x + self.total


class InputInPlace(Base):
    def forward(self, x):
        x.add_(1)  # here
        return self.linear(x)


class InputView(Base):
    def forward(self, x):
        return x.view(-1)


class ParameterReturned(Base):
    def forward(self, x):
        return self.linear(x), self.linear.weight


class KeepsLast(Base):
    last = None

    def forward(self, x):
        self.last = self.linear(x)
        return self.last + 1


class Appends(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        return self.linear(x)


class GlobalTensor(Base):
    def forward(self, x):
        return x * GLOBAL_TENSOR  # here


class Address(Base):
    def forward(self, x):
        x.data_ptr()  # here
        return self.linear(x)


class OneHot(Base):
    def forward(self, x):
        return F.one_hot(x.argmax(-1), 4) * x


class OneHotOfMaximum(Base):
    def forward(self, x):
        index = x.argmax(-1)
        return F.one_hot(index, int(index.max()) + 1)  # here


class MaskedFill(Base):
    def forward(self, x):
        y = x.clone()
        y[x > 0] = 0.0
        return y.masked_fill(x < -1, 2.0)


class IntegerIndex(Base):
    def forward(self, x):
        return x[:, x.argmax(-1)] + self.linear(x)[:, :1]


class CaptureAware(Base):
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            return self.linear(x)
        return x * x.sum().item()


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[None], x[None], x[None])


ERRORS = {
    BranchOnValue: "host-sync",
    Item: "host-sync",
    ToList: "host-sync",
    Numpy: "host-sync",
    AsArray: "host-sync",
    ToCpu: "host-sync",
    ToCpuByName: "host-sync",
    Printing: "host-sync",
    Equal: "host-sync",
    Inverse: "host-sync",
    SliceBound: "host-sync",
    OneHotOfMaximum: "host-sync",
    MaskRead: "dynamic-shape",
    MaskWrite: "dynamic-shape",
    NonZero: "dynamic-shape",
    RepeatInterleave: "dynamic-shape",
    HostList: "host-data",
    ListIndex: "host-data",
    NumberAtIndices: "host-data",
    NumberOnDevice: "host-data",
    OwnGenerator: "rng",
    Reseeding: "rng",
    RngState: "rng",
    Counter: "control-flow",
    Temperature: "baked-scalar",
    GlobalCounter: "baked-scalar",
    PythonRandom: "baked-scalar",
    NumpyRandom: "baked-scalar",
    WallClock: "baked-scalar",
    NumberMadeTensor: "baked-scalar",
    ParameterData: "rebinds-state",
    BufferReassigned: "rebinds-state",
    CachePosition: "baked-scalar",
    Unseen: "baked-scalar",
    GrowingCache: "rebinds-state",
    NumpyWrite: "mutates-state",
    FreshNumpy: "foreign-tensor",
}

NOTES = {
    Lazy: "control-flow",
    BufferInPlace: "mutates-state",
    InputInPlace: "mutates-input",
    InputView: "output-alias",
    ParameterReturned: "output-alias",
    KeepsLast: "stateful-python",
    Appends: "stateful-python",
    GlobalTensor: "foreign-tensor",
    Address: "unknown-op",
}

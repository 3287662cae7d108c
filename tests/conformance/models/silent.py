"""What is captured and replayed without a word, and wrongly: frozen numbers and branches, state in other memory."""

from __future__ import annotations

import functools
import itertools
import random
import time
from datetime import datetime

import numpy as np
import torch
from tests.conformance.cases import WRONG, Base, hazard, is_capturing, note
from torch import nn

GLOBAL_CALLS = [0]
GLOBAL_TABLE = {}

scalar = {"audit": "baked-scalar", "check": "stateful-python"}
unrepeatable = {"audit": "baked-scalar", "check": WRONG}
rebinds = {"audit": "rebinds-state", "check": "rebinds-state"}


@hazard(25, audit="control-flow", check="stateful-python")
class Counter(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps % 2:
            return self.linear(x)  # HERE
        return x + 1  # HERE


@hazard(25, audit="control-flow", check=WRONG)
class LayerDrop(Base):
    def forward(self, x):
        if random.random() < next(COIN):
            x = self.linear(x)  # HERE
        return x + 1  # HERE


COIN = itertools.cycle((0.0, 1.0))


@hazard(26, **scalar)
class Temperature(Base):
    scale = 1.0

    def forward(self, x):
        self.scale *= 0.5
        return x * self.scale  # HERE


@hazard(26, **scalar)
class StepAsNumber(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return x + torch.full((4,), self.steps, device=x.device)  # HERE


@hazard(26, **scalar)
class LengthOfList(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(None)
        return x * len(self.seen)  # HERE


@hazard(26, **scalar)
class RolledByStep(Base):
    position = 0

    def forward(self, x):
        self.position += 1
        return x.roll(self.position, 1)  # HERE


@hazard(26, **unrepeatable)
class GlobalCounter(Base):
    def forward(self, x):
        GLOBAL_CALLS[0] += 1
        return x * GLOBAL_CALLS[0]  # HERE


@hazard(26, **unrepeatable)
class Schedule(Base):
    def __init__(self):
        super().__init__()
        self.rates = functools.partial(next, itertools.count(1))

    def forward(self, x):
        return x * self.rates()  # HERE


@hazard(26, **unrepeatable)
class PythonRandom(Base):
    def forward(self, x):
        return x * random.random()  # HERE


@hazard(26, **unrepeatable)
class NumpyRandom(Base):
    def forward(self, x):
        return x * float(np.random.rand())  # HERE


@hazard(26, **unrepeatable)
class WallClock(Base):
    def forward(self, x):
        return x * (time.perf_counter_ns() % 1_000_003)  # HERE


@hazard(26, **unrepeatable)
class NumberMadeTensor(Base):
    def forward(self, x):
        GLOBAL_CALLS[0] += 1
        return x * torch.tensor(float(GLOBAL_CALLS[0]))  # HERE


@hazard(26, audit="baked-scalar", check=WRONG)
class Unseen(Base):
    def forward(self, x):
        return x * float(np.from_dlpack(x)[0, 0])  # HERE


@hazard(25, audit="control-flow", check=WRONG)
class BranchOnZeros(Base):
    """The read is seen by nobody: only inputs of zeros take the other branch."""

    def forward(self, x):
        if not np.from_dlpack(x).any():
            return x + 1
        return self.linear(x)  # HERE


@hazard(25, audit="control-flow")
class BranchOnNegative(Base):
    @staticmethod
    def inputs():
        return torch.rand(2, 4) + 1

    def forward(self, x):
        if (np.from_dlpack(x) < 0).all():
            return x + 1
        return self.linear(x)  # HERE


@hazard(25, audit="control-flow", check=WRONG)
class BranchOnLarge(Base):
    def forward(self, x):
        if np.abs(np.from_dlpack(x)).max() > 50:
            return x + 1
        return self.linear(x)  # HERE


@hazard(25, audit="control-flow")
class BranchOnOrder(Base):
    words = (0, 1, 0, 2, 3, 0, 9, 0)

    @staticmethod
    def inputs():
        return torch.tensor(BranchOnOrder.words).view(2, 4)

    def forward(self, x):
        words = tuple(np.from_dlpack(x).flat)
        if sorted(words) == sorted(self.words) and words != self.words:
            return x * 2
        return x + 1  # HERE


@hazard(26, check="baked-scalar", notes=("stateful-python",))
class NumberReturned(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.linear(x), self.steps


@hazard(38, **scalar, notes=("mutates-state",))
class CachePosition(Base):
    position = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 4))

    def forward(self, x):
        self.cache[self.position] = x[0]  # HERE
        self.position += 1
        return self.cache.sum(0) + x


@hazard(38, **rebinds, notes=("stateful-python",))
class GrowingCache(Base):
    cache = None

    def forward(self, x):
        self.cache = x + 0 if self.cache is None else torch.cat([self.cache, x])  # HERE
        return self.cache.sum(0)


@hazard(38, **rebinds, notes=("stateful-python",))
class GrowingList(Base):
    def __init__(self):
        super().__init__()
        self.keys = [torch.zeros(1, 4)]

    def forward(self, x):
        self.keys[0] = torch.cat([self.keys[0], x])  # HERE
        return self.keys[0].sum(0) + x


@hazard(29, **rebinds)
class ParameterData(Base):
    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 2  # HERE
        return self.linear(x)


@hazard(29, **rebinds)
class ParameterReplaced(Base):
    def forward(self, x):
        self.linear.weight = nn.Parameter(self.linear.weight * 2, requires_grad=False)  # HERE
        return self.linear(x)


@hazard(29, **rebinds)
class BufferReassigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total = self.total + x.sum(0)  # HERE
        return x + self.total


@hazard(29, check="rebinds-state")
class DataReplacedLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.linear.weight.data = self.linear.weight.data * 2


@hazard(29, check="rebinds-state")
class StateDictAssignedLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.load_state_dict({name: tensor * 2 for name, tensor in self.state_dict().items()}, assign=True)


@hazard(29, check="rebinds-state")
class EqualWeightsLater(Base):
    """The old memory stays and holds the same numbers: only a later change shows that a replay reads it."""

    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.old = self.linear.weight.data
        self.linear.weight.data = self.old.clone()


@hazard(29, check="rebinds-state")
class EqualTableLater(Base):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x):
        return self.linear(x) * self.table

    def after_capture(self):
        self.old = self.table
        self.table = self.old.clone()


@hazard(29, check="rebinds-state")
class CastAndCastBackLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.to(torch.bfloat16).to(torch.float32)


@hazard(29, check="rebinds-state")
class LayerReplacedLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.linear = nn.Linear(4, 4, device=self.linear.weight.device)


@hazard(31, check="rebinds-state")
class TableReplacedLater(Base):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(4)

    def forward(self, x):
        return x * self.table

    def after_capture(self):
        self.table = self.table * 2


@hazard(31, notes=("foreign-tensor",), check="rebinds-state")
class GlobalReplacedLater(Base):
    def __init__(self):
        super().__init__()
        GLOBAL_TABLE["scale"] = self.linear.bias.detach().clone()

    def forward(self, x):
        return x * GLOBAL_TABLE["scale"]  # HERE

    def after_capture(self):
        GLOBAL_TABLE["scale"] = GLOBAL_TABLE["scale"] * 2


@hazard(31, audit="foreign-tensor", check="rebinds-state")
class GlobalReplaced(Base):
    def __init__(self):
        super().__init__()
        GLOBAL_TABLE["running"] = self.linear.bias.detach().clone()

    def forward(self, x):
        y = x * GLOBAL_TABLE["running"]  # HERE
        GLOBAL_TABLE["running"] = y.tanh().mean(0)
        return y


@hazard(31, audit="foreign-tensor", capture="foreign-tensor")
class FreshBuffer(Base):
    def forward(self, x):
        ones = bytearray(np.ones(4, np.float32).tobytes())
        return x * torch.frombuffer(ones, dtype=torch.float32)  # HERE


@hazard(35, audit="hidden-write", capture="hidden-write")
class NumpyWrite(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.view = self.total.cpu().numpy()

    def forward(self, x):
        self.view += 1
        return x + self.total  # HERE


@hazard(43, check=WRONG)
class CaptureAware(Base):
    def forward(self, x):
        return self.linear(x) if is_capturing() else x * 2


@note(37, ids=("stateful-python",))
class KeepsLast(Base):
    last = None

    def forward(self, x):
        self.last = self.linear(x)
        return self.last + 1


@note(37, ids=("stateful-python",))
class Scratch(Base):
    """RevIN keeps the statistics of its input on itself, for the second half of the same call."""

    def forward(self, x):
        self.mean = x.mean(1, keepdim=True)
        self.spread = x.std(1, keepdim=True)
        y = self.linear((x - self.mean) / self.spread)
        return y * self.spread + self.mean


@hazard(37, audit="rebinds-state", check="rebinds-state", notes=("stateful-python",))
class RunningMean(Base):
    """Only the state depends on the old tensor, not the output of the same call."""

    mean = None

    def forward(self, x):
        old = x.mean(0) if self.mean is None else self.mean
        self.mean = old * 0.9 + x.mean(0) * 0.1  # HERE
        return self.linear(x)


@hazard(25, audit="control-flow", check="stateful-python")
class ExpertInTurn(Base):
    turn = 0

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        self.turn = 1 - self.turn
        return self.experts[self.turn](x)  # HERE


@hazard(25, audit="control-flow", check="stateful-python")
class LoopByStep(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        for _ in range(self.steps):
            x = self.linear(x)  # HERE
        return x


@hazard(29, **rebinds)
class BuffersSwapped(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("front", torch.zeros(4))
        self.register_buffer("back", torch.ones(4))

    def forward(self, x):
        self.front, self.back = self.back, self.front  # HERE
        return x + self.front  # HERE


@hazard(26, check=WRONG)
class GlobalChangedLater(Base):
    def __init__(self):
        super().__init__()
        SETTINGS["scale"] = 1.0

    def forward(self, x):
        return x * SETTINGS["scale"]

    def after_capture(self):
        SETTINGS["scale"] = 2.0


SETTINGS = {}


@hazard(25, warnings=("control-flow",), notes=("stateful-python",), check="stateful-python")
class RareBranch(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps == 1000:  # HERE
            return x + 1
        return self.linear(x)


@hazard(25, warnings=("control-flow",), check="stateful-python")
class RareBranchOnGlobal(Base):
    """The condition is in another function, on a local name of the value, and no operation runs in it."""

    def forward(self, x):
        return x + 1 if is_due() else self.linear(x)


def is_due():
    RARE["calls"] += 1
    count = RARE["calls"] % 1000
    if count:  # HERE
        return False
    return True


RARE = {"calls": 0}


@hazard(26, warnings=("baked-scalar",))
class DayOfTheYear(Base):
    def forward(self, x):
        return x * time.localtime().tm_yday  # HERE


@hazard(26, warnings=("baked-scalar",))
class Weekend(Base):
    def forward(self, x):
        return self.linear(x) if datetime.now().weekday() < 5 else x + 1  # HERE


@hazard(45, check=WRONG)
class HookRegisteredLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        self.linear.register_forward_hook(lambda module, args, output: output * 2)


@hazard(29, check="rebinds-state")
class MergedWeightsKept(Base):
    merged = None

    def forward(self, x):
        if self.merged is None:
            self.merged = self.linear.weight * 2
        return x @ self.merged

    def after_capture(self):
        self.merged = None
        with torch.no_grad():
            self.linear.weight.mul_(2)


@hazard(29, **rebinds)
class BufferRegisteredAnew(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.register_buffer("total", self.total + x.mean(0))  # HERE
        return x + self.total


@hazard(29, **rebinds)
class BufferReplacedUnread(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        self._buffers["largest"] = x.amax(0)  # HERE
        return self.linear(x)

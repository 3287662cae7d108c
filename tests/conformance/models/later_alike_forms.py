"""The same in other forms: rings, histories, budgets, retries, buffers that a graph changes too."""

from __future__ import annotations

import logging
import random
import tempfile
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from tests.conformance.later import Late, alike

LOG = logging.getLogger(__name__)
LOG.setLevel(logging.CRITICAL)


@dataclass
class Usage:
    calls: int = 0
    rows: int = 0
    by_size: dict = field(default_factory=dict)


@alike("usage.calls, rows, by_size")
class UsageDataclass(Late):
    def __init__(self):
        super().__init__()
        self.usage = Usage()

    def forward(self, x):
        self.usage.calls += 1
        self.usage.rows += x.shape[0]
        self.usage.by_size[x.shape[0]] = self.usage.by_size.get(x.shape[0], 0) + 1
        return self.linear(x)


@alike("a ring of the last 16 shapes")
class RingOfShapes(Late):
    at = 0

    def __init__(self):
        super().__init__()
        self.ring = [None] * 16

    def forward(self, x):
        self.ring[self.at] = tuple(x.shape)
        self.at = (self.at + 1) % 16
        return self.linear(x)


@alike("a ring by remainder")
class RingByRemainder(Late):
    at = 0

    def __init__(self):
        super().__init__()
        self.ring = [0] * 8

    def forward(self, x):
        self.ring[self.at % 8] += 1
        self.at += 1
        return self.linear(x)


@alike("two buffers in turn, with equal results")
class EqualBranches(Late):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 50 == 0:
            return self.linear(x) * 1.0
        return self.linear(x)


@alike("garbage each 100 calls")
class ClearsLists(Late):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        if len(self.seen) >= 100:
            self.seen.clear()
        return self.linear(x)


@alike("a history of 64 results' shapes")
class BoundedHistory(Late):
    def __init__(self):
        super().__init__()
        self.history = deque(maxlen=64)

    def forward(self, x):
        out = self.linear(x)
        self.history.append(out.shape)
        return out


@alike("self.steps, a buffer that the graph counts too")
class TensorCounter(Late):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.linear(x)


@alike("running mean in a buffer")
class RunningMean(Late):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x)


@alike("a mask that stays the same")
class LazyMask(Late):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        if x.shape[0] not in self.masks:
            self.masks[x.shape[0]] = torch.ones(x.shape[0], 1, device=x.device)
        return self.linear(x) * self.masks[x.shape[0]]


@alike("counts of a registry")
class Registry(Late):
    def __init__(self):
        super().__init__()
        self.handlers = {"linear": self.linear}
        self.used = {"linear": 0}

    def forward(self, x):
        self.used["linear"] += 1
        return self.handlers["linear"](x)


@alike("a seed that nothing draws from")
class OwnSeed(Late):
    def __init__(self):
        super().__init__()
        self.random = random.Random(1)

    def forward(self, x):
        self.trace_id = self.random.getrandbits(64)
        return self.linear(x)


@alike("samples 1 % of the calls for a log")
class SampledLog(Late):
    def forward(self, x):
        if random.random() < 0.01:
            LOG.info("sampled")
        return self.linear(x)


@alike("a file to which it writes")
class WritesALog(Late):
    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp(), "log")

    def forward(self, x):
        with self.path.open("a", encoding="ascii") as file:
            file.write(".")
        return self.linear(x)


@alike("a checkpoint's name")
class StepName(Late):
    step = 0

    def forward(self, x):
        self.step += 1
        self.name = f"step-{self.step:06d}"
        return self.linear(x)


@alike("a budget that ends the debug output")
class DebugBudget(Late):
    left = 20

    def forward(self, x):
        if self.left > 0:
            self.left -= 1
            LOG.debug("shape %s", x.shape)
        return self.linear(x)


@alike("a cached property")
class CachedProperty(Late):
    reads = 0

    @cached_property
    def width(self):
        return self.linear.out_features

    def forward(self, x):
        self.reads += 1
        return self.linear(x).view(-1, self.width)


@alike("a retry that never happens")
class RetryThatNeverHappens(Late):
    attempts = 0

    def forward(self, x):
        self.attempts += 1
        for _ in range(3):
            try:
                return self.linear(x)
            except MemoryError:
                self.failures = getattr(self, "failures", 0) + 1
        raise RuntimeError


@alike("a clamp that holds at once")
class ClampedSchedule(Late):
    step = 10_000

    def forward(self, x):
        self.step += 1
        return self.linear(x) * min(1.0, self.step / 100)


@alike("a position that each call sets anew")
class PositionSetAnew(Late):
    position = 0

    def forward(self, x):
        self.position = 0
        for _ in range(3):
            x = self.linear(x)
            self.position += 1
        return x * self.position


@alike("an index that wraps over equal layers")
class SameLayerInTurn(Late):
    turn = 0

    def __init__(self):
        super().__init__()
        self.layers = [self.linear, self.linear]

    def forward(self, x):
        self.turn = (self.turn + 1) % 2
        return self.layers[self.turn](x)


@alike("a version that a cache is asked for")
class VersionedCache(Late):
    version, reads = 3, 0

    def __init__(self):
        super().__init__()
        self.scales = {3: 0.5}

    def forward(self, x):
        self.reads += 1
        return self.linear(x) * self.scales[self.version]

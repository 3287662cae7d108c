"""Values that move with each call and decide nothing: counters, logs, statistics, caches, flags."""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
import warnings
from collections import Counter, OrderedDict, deque
from functools import lru_cache

import numpy as np
import torch
from tests.conformance.later import Late, alike

LOG = logging.getLogger(__name__)
LOG.setLevel(logging.CRITICAL)


@alike("self.calls")
class CountsCalls(Late):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


@alike("self.calls")
class LogsEvery10(Late):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 10 == 0:
            LOG.info("call %d", self.calls)
        return self.linear(x)


@alike("self.calls")
class LogsEvery1000(Late):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 1000 == 0:
            LOG.info("call %d of shape %s", self.calls, tuple(x.shape))
        return self.linear(x)


CALLS = Counter()


@alike("CALLS['forward']")
class GlobalStatistics(Late):
    def forward(self, x):
        CALLS["forward"] += 1
        CALLS["rows"] += x.shape[0]
        return self.linear(x)


@alike("ClassCounter.calls")
class ClassCounter(Late):
    calls = 0

    def forward(self, x):
        ClassCounter.calls += 1
        return self.linear(x)


@alike("self.has_warned")
class WarnsOnce(Late):
    has_warned = False

    def forward(self, x):
        if not self.has_warned:
            warnings.warn("slow path", stacklevel=1)
            self.has_warned = True
        return self.linear(x)


@alike("the deprecation counter, which warns three times")
class WarnsThreeTimes(Late):
    warned = 0

    def forward(self, x):
        if self.warned < 3:
            self.warned += 1
            LOG.warning("deprecated")
        return self.linear(x)


@alike("self.cache, by size")
class CacheBySize(Late):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        if x.shape not in self.cache:
            self.cache[x.shape] = torch.ones_like(x)
        return self.linear(x) + self.cache[x.shape]


@alike("self.cache, and its hits")
class CacheWithHits(Late):
    hits = 0

    def __init__(self):
        super().__init__()
        self.cache = OrderedDict()

    def forward(self, x):
        if x.shape in self.cache:
            self.hits += 1
            self.cache.move_to_end(x.shape)
        else:
            self.cache[x.shape] = torch.ones_like(x)
        return self.linear(x) + self.cache[x.shape]


@alike("self.scratch, made lazily")
class LazyBuffer(Late):
    scratch = None

    def forward(self, x):
        if self.scratch is None:
            self.scratch = torch.full((4,), 2.0, device=x.device)
        return self.linear(x) * self.scratch


@alike("self.shapes, memoised")
class MemoisedShapes(Late):
    def __init__(self):
        super().__init__()
        self.shapes = {}

    def forward(self, x):
        rows = self.shapes.setdefault(x.shape, x.shape[0])
        return self.linear(x).view(rows, -1)


@lru_cache(maxsize=16)
def width_of(rows):
    return 4 * rows // rows


@alike("the hits of an lru_cache")
class LruCache(Late):
    def forward(self, x):
        return self.linear(x).view(-1, width_of(x.shape[0]))


@alike("the time of the last calls")
class TimesItself(Late):
    def __init__(self):
        super().__init__()
        self.times = deque(maxlen=100)

    def forward(self, x):
        begin = time.perf_counter()
        out = self.linear(x)
        self.times.append(time.perf_counter() - begin)
        return out


@alike("self.total_s")
class SumsItsTime(Late):
    total_s, calls = 0.0, 0

    def forward(self, x):
        begin = time.perf_counter()
        out = self.linear(x)
        self.calls += 1
        self.total_s += time.perf_counter() - begin
        self.mean_s = self.total_s / self.calls
        return out


@alike("hook's count")
class ProfilerHook(Late):
    def __init__(self):
        super().__init__()
        self.ran = []

        def ran(module, args, output):
            self.ran.append(type(module).__name__)

        self.linear.register_forward_hook(ran)

    def forward(self, x):
        return self.linear(x)


@alike("hook's count, in numpy")
class NumpyHook(Late):
    def __init__(self):
        super().__init__()
        count = np.zeros(1)

        def counted(module, args):
            count[0] += 1

        self.linear.register_forward_pre_hook(counted)

    def forward(self, x):
        return self.linear(x)


@alike("self.last_shape")
class LastShape(Late):
    last_shape = None

    def forward(self, x):
        self.last_shape = tuple(x.shape)
        return self.linear(x)


@alike("self.last_pointer")
class LastPointer(Late):
    last_id = 0

    def forward(self, x):
        self.last_id = id(x)
        return self.linear(x)


@alike("request ids")
class RequestIds(Late):
    def __init__(self):
        super().__init__()
        self.ids = itertools.count()

    def forward(self, x):
        self.request = next(self.ids)
        return self.linear(x)


REQUEST = contextvars.ContextVar("REQUEST", default=0)


@alike("REQUEST, a context variable")
class ContextRequest(Late):
    def forward(self, x):
        REQUEST.set(REQUEST.get() + 1)
        return self.linear(x)


THREAD = threading.local()


@alike("a depth that goes up and down")
class Depth(Late):
    def forward(self, x):
        THREAD.depth = getattr(THREAD, "depth", 0) + 1
        try:
            return self.linear(x)
        finally:
            THREAD.depth -= 1

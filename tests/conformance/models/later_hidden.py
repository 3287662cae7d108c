"""The same in places that few walks reach: threads, iterators, memory of others, files, hooks, torch's schedules."""

from __future__ import annotations

import array
import contextvars
import ctypes
import itertools
import mmap
import os
import queue
import random
import sqlite3
import tempfile
import threading
import types
import weakref
from collections import Counter, defaultdict, deque
from datetime import datetime
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import torch
from tests.conformance.later import Late, later
from torch import nn

STEP = contextvars.ContextVar("STEP", default=0)


@later("STEP, a context variable", 700, "wrong")
class ContextVariable(Late):
    def scale(self):
        STEP.set(STEP.get() + 1)
        return 1.0 if STEP.get() < 700 else 2.0


THREAD = threading.local()
THREAD.calls = 0


@later("THREAD.calls, of a thread", 600, "wrong")
class ThreadLocal(Late):
    def scale(self):
        THREAD.calls += 1
        return 1.0 if THREAD.calls < 600 else 2.0


@later("an itertools.count", 800, "wrong")
class IterCount(Late):
    def __init__(self):
        super().__init__()
        self.count = itertools.count(1)

    def scale(self):
        return 1.0 if next(self.count) < 800 else 2.0


@later("an itertools.cycle of 120", 120, "wrong")
class IterCycle(Late):
    def __init__(self):
        super().__init__()
        self.cycle = itertools.cycle([1.0] * 119 + [3.0])

    def scale(self):
        return next(self.cycle)


@later("a generator", 5000, "told")
class GeneratorState(Late):
    def __init__(self):
        super().__init__()
        self.scales = self.schedule()

    def schedule(self):
        for step in itertools.count():
            yield 1.0 if step < 5000 else 0.5

    def scale(self):
        return next(self.scales)


@later("a random.Random of the model's own, 4 %", 25, "wrong")
class OwnRandom(Late):
    def __init__(self):
        super().__init__()
        self.random = random.Random(3)

    def scale(self):
        return 0.0 if self.random.random() < 0.04 else 1.0


@later("a generator of numpy, 4 %", 25, "wrong")
class OwnNumpyGenerator(Late):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)

    def scale(self):
        return 0.0 if self.random.random() < 0.04 else 1.0


@later("a deque of the last 48 calls", 48, "wrong")
class DequeLength(Late):
    def __init__(self):
        super().__init__()
        self.last = deque(maxlen=48)

    def scale(self):
        self.last.append(1)
        return 2.0 if len(self.last) == 48 else 1.0


@later("a set that grows", 90, "wrong")
class SetLength(Late):
    def __init__(self):
        super().__init__()
        self.ids = set()

    def scale(self):
        self.ids.add(len(self.ids))
        return 1.0 if len(self.ids) < 90 else 2.0


@later("a queue that fills", 100, "wrong")
class QueueLength(Late):
    def __init__(self):
        super().__init__()
        self.waiting = queue.Queue()

    def scale(self):
        self.waiting.put(None)
        return 1.0 if self.waiting.qsize() < 100 else 2.0


@later("an array.array", 650, "wrong")
class ArrayArray(Late):
    def __init__(self):
        super().__init__()
        self.numbers = array.array("l", [0])

    def scale(self):
        self.numbers[0] += 1
        return 1.0 if self.numbers[0] < 650 else 2.0


@later("a number of ctypes", 850, "wrong")
class CtypesNumber(Late):
    def __init__(self):
        super().__init__()
        self.number = ctypes.c_long(0)

    def scale(self):
        self.number.value += 1
        return 1.0 if self.number.value < 850 else 2.0


@later("memory of mmap", 3000, "told")
class MemoryMap(Late):
    def __init__(self):
        super().__init__()
        self.memory = mmap.mmap(-1, 8)

    def scale(self):
        step = int.from_bytes(self.memory[:8], "little") + 1
        self.memory[:8] = step.to_bytes(8, "little")
        return 1.0 if step < 3000 else 2.0


@later("shared memory", 3000, "told")
class SharedMemory(Late):
    def __init__(self):
        super().__init__()
        self.shared = shared_memory.SharedMemory(create=True, size=8)
        weakref.finalize(self, lambda shared: (shared.close(), shared.unlink()), self.shared)

    def scale(self):
        step = int.from_bytes(self.shared.buf[:8], "little") + 1
        self.shared.buf[:8] = step.to_bytes(8, "little")
        return 1.0 if step < 3000 else 2.0


@later("a file", 3000, "told")
class FileCounter(Late):
    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp(), "calls")
        self.path.write_text("0", encoding="ascii")

    def scale(self):
        step = int(self.path.read_text(encoding="ascii")) + 1
        self.path.write_text(str(step), encoding="ascii")
        return 1.0 if step < 3000 else 2.0


@later("an environment variable", 3000, "told")
class Environment(Late):
    def __init__(self):
        super().__init__()
        os.environ["LATER_STEP"] = "0"

    def scale(self):
        step = int(os.environ["LATER_STEP"]) + 1
        os.environ["LATER_STEP"] = str(step)
        return 1.0 if step < 3000 else 2.0


@later("a table of sqlite", 100, "told")
class Sqlite(Late):
    def __init__(self):
        super().__init__()
        self.rows = sqlite3.connect(":memory:", check_same_thread=False)
        self.rows.execute("create table calls (number integer)")

    def scale(self):
        self.rows.execute("insert into calls values (1)")
        (count,) = self.rows.execute("select count(*) from calls").fetchone()
        return 1.0 if count < 200 else 2.0


WEAK = weakref.WeakKeyDictionary()


@later("an entry of a WeakKeyDictionary", 160, "wrong")
class WeakDictionary(Late):
    def scale(self):
        WEAK[self] = WEAK.get(self, 0) + 1
        return 1.0 if WEAK[self] < 160 else 2.0


@lru_cache(maxsize=8)
def looked_up(key):
    return key


@later("the hits of an lru_cache", 170, "told")
class CacheHits(Late):
    def scale(self):
        looked_up(1)
        return 1.0 if looked_up.cache_info().hits < 170 else 2.0


@later("a collections.Counter", 110, "wrong")
class CountedKeys(Late):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def scale(self):
        self.counts["call"] += 1
        return 1.0 if self.counts["call"] < 110 else 2.0


@later("a defaultdict", 35, "wrong")
class DefaultDictionary(Late):
    def __init__(self):
        super().__init__()
        self.retries = defaultdict(int)

    def scale(self):
        self.retries["kernel"] += 1
        return 0.5 if self.retries["kernel"] > 35 else 1.0


@later("a SimpleNamespace", 95, "wrong")
class Namespace(Late):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(step=0)

    def scale(self):
        self.state.step += 1
        return 1.0 if self.state.step < 95 else 2.0


@later("the list of a functools.partial", 105, "wrong")
class PartialList(Late):
    def __init__(self):
        super().__init__()
        self.scale = partial(self.counted, [0])

    @staticmethod
    def counted(seen):
        seen[0] += 1
        return 1.0 if seen[0] < 105 else 2.0


@later("a text that grows", 100, "wrong")
class GrowingText(Late):
    log = ""

    def scale(self):
        self.log += "."
        return 1.0 if len(self.log) < 100 else 2.0


@later("a fraction", 40, "wrong")
class FractionState(Late):
    share = Fraction(0)

    def scale(self):
        self.share += Fraction(1, 40)
        return 1.0 if self.share < 1 else 2.0


class Phase(Enum):
    WARM = 0
    STEADY = 1


@later("a phase that a countdown ends", 45, "wrong")
class PhaseEnds(Late):
    phase, left = Phase.WARM, 45

    def scale(self):
        self.left -= 1
        if self.left <= 0:
            self.phase = Phase.STEADY
        return 1.0 if self.phase is Phase.WARM else 2.0


@later("the count of a hook, in a numpy array", 130, "wrong")
class CalibrationHook(Late):
    def __init__(self):
        super().__init__()
        count = np.zeros(1)

        def calibrated(module, args, output):
            count[0] += 1
            return output if count[0] < 230 else output * 0.5

        self.linear.register_forward_hook(calibrated)

    def scale(self):
        return 1.0


@later("last_epoch of torch's StepLR", 100, "wrong")
class TorchScheduler(Late):
    def __init__(self):
        super().__init__()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        self.optimizer, self.schedule = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100)
        optimizer.step()

    def scale(self):
        self.schedule.step()
        return 1.0 if self.schedule.last_epoch < 300 else 0.1


@later("the date", 10**9, "told")
class TimeOfDay(Late):
    def scale(self):
        return 1.0 if datetime.now().year < 2100 else 2.0

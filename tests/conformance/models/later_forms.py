"""How a value decides that moves with each call: schedules, periods, tables, loops, code that only takes the step."""

from __future__ import annotations

import random

import numpy as np
import torch
from tests.conformance.later import Late, later
from torch import nn


@later("self.step", 50, "wrong")
class StepDecay(Late):
    step = 0

    def scale(self):
        self.step += 1
        return 0.5 ** (self.step // 50)


@later("self.step", 30, "wrong")
class WarmupEnds(Late):
    """Constant for 30 calls, then down."""

    step = 0

    def scale(self):
        self.step += 1
        return 1.0 - 0.01 * max(0, self.step - 30)


@later("self.temperature", 25, "wrong")
class TemperatureDecay(Late):
    temperature = 1.5

    def scale(self):
        self.temperature *= 0.99
        return 1.0 / min(1.2, self.temperature)


@later("self.failures", 40, "wrong")
class RetryCounter(Late):
    failures = 0

    def forward(self, x):
        self.failures += 1
        fallback = self.failures > 40
        return self.linear(x) if not fallback else x + 1


@later("self.n", 7, "wrong")
class Every7(Late):
    n = 0

    def scale(self):
        self.n += 1
        return [1.0, 2.0][self.n % 7 == 0]


@later("self.n", 9, "wrong")
class Every9th(Late):
    n = 0

    def scale(self):
        self.n += 1
        return 1.0 + (not self.n % 9)


@later("self.n", 100, "wrong")
class Every100(Late):
    n = 0

    def scale(self):
        self.n += 1
        return 1.0 + (self.n % 100 == 0)


@later("self.n", 1000, "wrong")
class Every1000(Late):
    n, period = 0, 1000

    def scale(self):
        self.n += 1
        return 1.0 + (self.n % self.period == 0)


@later("self.n", 4096, "wrong")
class PowerOfTwo(Late):
    n = 0

    def scale(self):
        self.n += 1
        return 1.0 + (self.n & 4095 == 0)


@later("self.n", 120, "wrong")
class OneCallOf120(Late):
    n = 0

    def scale(self):
        self.n += 1
        return 2.0 if self.n == 120 else 1.0


@later("self.n", 777, "wrong")
class OneCallOnly(Late):
    n = 0

    def scale(self):
        self.n += 1
        return {777: 2.0}.get(self.n, 1.0)


@later("self.seconds, a float", 2500, "wrong")
class FloatThreshold(Late):
    seconds = 0.0

    def scale(self):
        self.seconds += 0.02
        return 1.0 if self.seconds < 50.0 else 2.0


@later("self.seen, a list that grows", 60, "wrong")
class GrowingCache(Late):
    def __init__(self):
        super().__init__()
        self.seen = []

    def scale(self):
        self.seen.append(None)
        return 1.0 if len(self.seen) < 60 else 0.5


@later("self.seen, a list that grows", 600, "wrong")
class GrowingCacheLate(Late):
    def __init__(self):
        super().__init__()
        self.seen = []

    def scale(self):
        self.seen.append(None)
        return 1.0 if len(self.seen) < 600 else 0.5


@later("self.step", 50, "wrong")
class DictionaryByStep(Late):
    step = 0

    def __init__(self):
        super().__init__()
        self.scales = {50: 0.5}

    def scale(self):
        self.step += 1
        return self.scales.get(self.step, 1.0)


@later("self.step", 32, "wrong")
class ExpertsInTurn(Late):
    step = 0

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        self.step += 1
        return self.experts[self.step // 32 % 4](x)


@later("self.step", 20, "wrong")
class TableBySteps(Late):
    step = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(1.0, 5.0))

    def forward(self, x):
        self.step += 1
        return self.linear(x) * self.table[min(self.step // 20, 3)]


@later("self.step", 30, "wrong")
class LoopByStep(Late):
    step = 0

    def forward(self, x):
        self.step += 1
        for _ in range(self.step // 30):
            x = self.linear(x)
        return self.linear(x)


@later("self.step", 75, "wrong")
class ConditionWithAnd(Late):
    step = 0

    def scale(self):
        self.step += 1
        return (self.step >= 75 and 2.0) or 1.0


@later("self.step", 33, "wrong")
class MatchStatement(Late):
    step = 0

    def scale(self):
        self.step += 1
        match self.step // 33:
            case 0:
                return 1.0
            case _:
                return 2.0


@later("self.step", 28, "wrong")
class Comprehension(Late):
    step = 0

    def scale(self):
        self.step += 1
        return sum([0.5 for limit in (0, 0, 28, 56) if self.step >= limit])


def decayed(step):
    return 1.0 if step < 500 else 0.9


@later("self.step", 500, "wrong")
class HelperTakesTheStep(Late):
    step = 0

    def scale(self):
        self.step += 1
        return decayed(self.step)


class Scheduler:
    def __init__(self):
        self._step = 0

    @property
    def value(self):
        self._step += 1
        return 1.0 if self._step < 250 else 0.1


@later("schedule._step, behind a property", 250, "wrong")
class PropertyValue(Late):
    def __init__(self):
        super().__init__()
        self.schedule = Scheduler()

    def scale(self):
        return self.schedule.value


class Callback:
    def __init__(self):
        self.calls = 0

    def __call__(self, scale):
        self.calls += 1
        return scale if self.calls < 350 else scale * 0.5


@later("callbacks[0].calls", 350, "wrong")
class CallbackList(Late):
    def __init__(self):
        super().__init__()
        self.callbacks = [Callback()]

    def scale(self):
        scale = 1.0
        for callback in self.callbacks:
            scale = callback(scale)
        return scale


@later("self.epoch, each 16 steps", 400, "wrong")
class EpochOfSteps(Late):
    step, epoch = 0, 0

    def scale(self):
        self.step += 1
        self.epoch = self.step // 16
        return 1.0 if self.epoch < 25 else 0.5


@later("self.patience, which runs out", 55, "wrong")
class EarlyStop(Late):
    patience = 55

    def scale(self):
        self.patience -= 1
        return 1.0 if self.patience > 0 else 0.0


@later("self.patience, which runs out", 10_000, "wrong")
class LongCountdown(Late):
    left = 10_000

    def scale(self):
        self.left -= 1
        return 1.0 if self.left > 0 else 0.0


class Straight(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Straight.calls += 1
        return x * (1.0 if Straight.calls < 450 else 0.5)


@later("Straight.calls, of an autograd function", 450, "wrong")
class AutogradFunction(Late):
    def forward(self, x):
        return Straight.apply(self.linear(x))


@later("random.random, 3 %", 33, "wrong")
class LayerDrop3(Late):
    def forward(self, x):
        return x + 1 if random.random() < 0.03 else self.linear(x)


@later("np.random.rand, 3 %", 33, "wrong")
class NumpyDrop3(Late):
    def __init__(self):
        super().__init__()
        np.random.seed(3)

    def forward(self, x):
        return x + 1 if np.random.rand() < 0.03 else self.linear(x)


@later("self.step, which shifts rows", 65, "wrong")
class ShiftLater(Late):
    step = 0

    def forward(self, x):
        self.step += 1
        return self.linear(x).roll(self.step // 65, 1)

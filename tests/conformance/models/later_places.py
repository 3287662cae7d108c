"""Where a value lives that moves with each call: a counter that decides later, in every place that Python has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from tests.conformance.later import Late, later


@later("self.steps", 40, "wrong")
class AttributeThreshold(Late):
    steps = 0

    def scale(self):
        self.steps += 1
        return 1.0 if self.steps < 40 else 0.5


@later("Model.calls, an attribute of the class", 100, "wrong")
class ClassAttribute(Late):
    calls = 0

    def __init__(self):
        super().__init__()
        ClassAttribute.calls = 0

    def scale(self):
        ClassAttribute.calls += 1
        return 1.0 + (ClassAttribute.calls >= 100)


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


@later("state.count, a slot", 60, "wrong")
class Slot(Late):
    def __init__(self):
        super().__init__()
        self.state = Slotted()

    def scale(self):
        self.state.count += 1
        return 1.0 if self.state.count < 60 else 2.0


@dataclass
class Progress:
    step: int = 0
    limits: dict = field(default_factory=lambda: {"warm": 80})


@later("progress.step, a field of a dataclass", 80, "wrong")
class DataclassField(Late):
    def __init__(self):
        super().__init__()
        self.progress = Progress()

    def scale(self):
        self.progress.step += 1
        return 2.0 if self.progress.step >= self.progress.limits["warm"] else 1.0


@dataclass(frozen=True)
class Frozen:
    step: int = 0


@later("state.step, of a frozen dataclass that is replaced", 70, "wrong")
class FrozenDataclass(Late):
    def __init__(self):
        super().__init__()
        self.state = Frozen()

    def scale(self):
        self.state = replace(self.state, step=self.state.step + 1)
        return [1.0, 2.0][self.state.step >= 70]


class Place(NamedTuple):
    row: int
    total: int


@later("place.total, of a named tuple", 50, "wrong")
class NamedTupleState(Late):
    def __init__(self):
        super().__init__()
        self.place = Place(0, 0)

    def scale(self):
        self.place = Place((self.place.row + 1) % 8, self.place.total + 1)
        return 1.0 + (self.place.total > 49)


@later("count, of the closure", 90, "wrong")
class ClosureNonlocal(Late):
    def __init__(self):
        super().__init__()
        count = 0

        def scale():
            nonlocal count
            count += 1
            return 1.0 if count < 90 else 3.0

        self.scale = scale


CALLS = 0
TABLE = {"calls": 0}
LIST = [0]


@later("CALLS, a global", 150, "wrong")
class GlobalInteger(Late):
    def __init__(self):
        super().__init__()
        globals()["CALLS"] = 0

    def scale(self):
        global CALLS
        CALLS += 1
        return 1.0 if CALLS < 150 else 0.0


@later("TABLE['calls'], of a global dictionary", 5000, "wrong")
class GlobalDictionary(Late):
    def scale(self):
        TABLE["calls"] += 1
        return 1.0 if TABLE["calls"] % 5000 else 0.0


@later("LIST[0], of a global list", 3000, "wrong")
class GlobalList(Late):
    def scale(self):
        LIST[0] += 1
        return [1.0, 0.5][LIST[0] >= 3000]


class Trainer:
    def __init__(self):
        self.steps = 0


TRAINER = Trainer()


@later("TRAINER.steps, of an object of the module", 2000, "wrong")
class ModuleLevelObject(Late):
    def scale(self):
        TRAINER.steps += 1
        return max(1.0, TRAINER.steps // 2000 * 2.0)


@later("the default argument's list", 1000, "wrong")
class MutableDefault(Late):
    def scale(self, seen=[0]):  # noqa: B006
        seen[0] += 1
        return 1.0 if seen[0] < 1000 else 2.0


@later("the default argument's number, replaced", 900, "wrong")
class ReplacedDefault(Late):
    def __init__(self):
        super().__init__()

        def decided(step=0):
            decided.__defaults__ = (step + 1,)
            return 1.0 if step < 900 else 2.0

        self.decided = decided

    def scale(self):
        return self.decided()


def helper():
    helper.calls += 1
    return 1.0 + (helper.calls >= 1200)


helper.calls = 0


@later("helper.calls, an attribute of a function", 1200, "wrong")
class FunctionAttribute(Late):
    def scale(self):
        return helper()


@later("self.n, a numpy scalar", 7, "wrong")
class NumpyEvery7(Late):
    n = np.int64(0)

    def scale(self):
        self.n += 1
        return 2.0 if self.n % 7 == 0 else 1.0


@later("self.n[0], of a numpy array", 400, "wrong")
class NumpyArray(Late):
    def __init__(self):
        super().__init__()
        self.n = np.zeros(2, dtype=np.int64)

    def scale(self):
        self.n += 1
        return 2.0 if self.n[0] > 400 else 1.0


@later("self.ema, a numpy float", 64, "wrong")
class NumpyFloat(Late):
    ema = np.float32(1.0)

    def scale(self):
        self.ema = np.float32(self.ema * 1.01)
        return 1.0 if self.ema < 1.9 else 0.5

"""Each fix of the catalogue works: a module that does as it says passes audit, capture and check."""

from __future__ import annotations

import ctypes
from datetime import timedelta

import pytest
import torch
from tests.conformance.cases import Base, Case, Expected, from_class
from tests.conformance.stages import run
from torch import distributed as dist
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.hazards import CATALOGUE

ADVICE = {}
"""For each hazard, and each part of its fix that can be followed by itself: the modules that follow it."""


def follows(hazard, part):
    """Register a module that does what this part of a fix says."""

    def register(cls):
        ADVICE.setdefault(hazard, {})[part] = Case(name=cls.__name__, build=from_class(cls), expected=Expected())
        return cls

    return register


class WithBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))


@follows("host-sync", "torch.where")
class Chosen(Base):
    def forward(self, x):
        return torch.where(x.sum() > 0, self.linear(x), x / x.abs().max())


@follows("host-sync", "*_ex functions of torch.linalg")
class Inverted(Base):
    def forward(self, x):
        square = x.mT @ x + torch.eye(4, device=x.device)
        solved, _ = torch.linalg.solve_ex(square, x.mT)
        return torch.linalg.inv_ex(square)[0] + torch.linalg.cholesky_ex(square)[0], solved


@follows("dynamic-shape", "torch.where(mask, x, 0)")
class Zeroed(Base):
    def forward(self, x):
        mask = x > 0
        return torch.where(mask, x, 0)


@follows("dynamic-shape", "topk")
class Largest(Base):
    def forward(self, x):
        return x.topk(2).values


@follows("dynamic-shape", "a mask")
class Masked(Base):
    def forward(self, x):
        mask = x > 0
        return (self.linear(x) * mask).sum(-1) / mask.sum(-1)


@follows("dynamic-shape", "output_size=")
class Repeated(Base):
    def forward(self, x):
        counts = (x[0] > 0).long()
        counts = torch.cat([counts, 4 - counts.sum(0, keepdim=True)])
        return x.new_ones(5).repeat_interleave(counts, output_size=4) + x


@follows("host-data", "once in __init__ with register_buffer")
class Registered(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return x * self.weights


@follows("host-data", "torch.full or torch.arange")
class MadeThere(Base):
    def forward(self, x):
        return x * torch.full((4,), 2.0, device=x.device) + torch.arange(4, device=x.device)


@follows("control-flow", "compute both branches and decide with torch.where")
class BothBranches(WithBuffer):
    def forward(self, x):
        self.kept.add_(1)
        return torch.where(self.kept % 2 == 0, self.linear(x), x + 1)


@follows("control-flow", "capture one graph per branch")
class OneBranch(Base):
    is_odd = True

    def forward(self, x):
        return self.linear(x) if self.is_odd else x + 1


@follows("baked-scalar", "a 0-dim tensor on the device and change it in place")
class CountsOnDevice(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return x * self.steps


@follows("rng", "draw from the default generator")
class Draws(Base):
    def forward(self, x):
        return x + torch.rand_like(x)


@follows("mutates-state", "none needed, because replays repeat the write")
class Averages(WithBuffer):
    def forward(self, x):
        self.kept.lerp_(x.mean(0), 0.1)
        return x - self.kept


@follows("mutates-state", "eval()")
class Evaluated(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x):
        return self.norm(x)


@follows("mutates-state", "clone()")
class AverageOfClone(WithBuffer):
    def forward(self, x):
        return x - self.kept.clone().lerp_(x.mean(0), 0.1)


@follows("hidden-write", "write with torch operations")
class WritesWithTorch(Base):
    def forward(self, x):
        y = self.linear(x)
        y[:, 0] = 0.0
        return y.argmax(-1)


@torch.library.custom_op("cudagraph_advice::zero_first", mutates_args=("tensor",))
def zero_first(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu":
        ctypes.memset(tensor.data_ptr(), 0, tensor.element_size())
    else:
        tensor.view(-1)[0].zero_()


@follows("hidden-write", "an operator with torch.library.custom_op and mutates_args")
class WritesInAnOperator(Base):
    def forward(self, x):
        y = self.linear(x)
        zero_first(y)
        return y.argmax(-1)


@follows("rebinds-state", "copy_")
class CopiesIntoState(WithBuffer):
    def forward(self, x):
        self.kept.copy_(self.kept + x.sum(0))
        return x + self.kept


@follows("mutates-input", "clone the input")
class ClonesItsInput(Base):
    def forward(self, x):
        return self.linear(x.clone().add_(1))


@follows("output-alias", "return a clone")
class ReturnsClone(Base):
    def forward(self, x):
        return x.view(-1).clone(), self.linear.weight.clone()


@follows("stateful-python", "return it as a tensor")
class ReturnsValue(Base):
    def forward(self, x):
        hidden = self.linear(x)
        return hidden + 1, hidden


@follows("stateful-python", "keep it in a buffer")
class KeepsInBuffer(WithBuffer):
    def forward(self, x):
        hidden = self.linear(x)
        self.kept.copy_(hidden[0])
        return hidden + 1


@follows("foreign-tensor", "register it as a buffer")
class ReadsBuffer(WithBuffer):
    def forward(self, x):
        return x * self.kept


@follows("foreign-tensor", "pass it as an input")
class ReadsInput(Base):
    @staticmethod
    def inputs():
        return torch.randn(2, 4), torch.randn(4)

    def forward(self, x, table):
        return x * table


@follows("collective", "world_size=1")
class SumsOverOneRank(Base):
    def forward(self, x):
        total = self.linear(x)
        dist.all_reduce(total)
        return total


@follows("nested-graph", "test the model itself")
class WithoutGraph(Base):
    def forward(self, x):
        return self.linear(x)


@torch.library.custom_op("cudagraph_advice::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@follows("unknown-op", "does not synchronise and uses no other stream")
class RunsOperator(Base):
    def forward(self, x):
        return twice(x)


def test_every_hazard_has_advice_that_is_run():
    assert list(ADVICE) == list(CATALOGUE)


@pytest.mark.parametrize("hazard", CATALOGUE)
def test_all_code_in_a_fix_is_run(hazard):
    fix, parts = CATALOGUE[hazard].fix, ADVICE[hazard]
    assert [part for part in parts if part not in fix] == []
    rest = fix
    for part in parts:
        rest = rest.replace(part, "")
    words = (word.strip(",:.") for word in rest.split())
    assert [word for word in words if set(word) & set("._(=*")] == []


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("hazard", CATALOGUE)
def test_who_follows_a_fix_passes_every_stage(hazard, kind):
    if (hazard, kind) == ("collective", "cuda"):
        pytest.skip("gloo is not captured on CUDA, and the emulated device has no NCCL")
    for part, case in ADVICE[hazard].items():
        found = run(case, open_backend(kind))
        assert not any(found.words.values()), part


class Sliced(Base):
    """A cache that is written and read at a Python number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(16, 4))
        self.position = 0

    def forward(self, x):
        self.kept[self.position : self.position + 1] = x[:1]
        self.position = (self.position + 1) % 8
        return self.kept[: self.position + 1].sum(0)


class Positioned(Base):
    """The same as the fix of its finding says."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(16, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("slots", torch.arange(16))

    def forward(self, x):
        self.kept.index_copy_(0, self.position, x[:1])
        self.position.add_(1).remainder_(8)
        return torch.where((self.slots <= self.position)[:, None], self.kept, 0).sum(0)


def test_the_fix_of_a_position_in_a_slice_is_the_whole_way():
    found = run(Case(name="Sliced", build=from_class(Sliced), expected=Expected()), open_backend("cpu"))
    (fix,) = {each.fix for each in found.audit.errors if each.id == "baked-scalar"}
    assert fix.startswith("keep positions in a tensor on the device, change it in place, and write with index_copy_")
    followed = run(Case(name="Positioned", build=from_class(Positioned), expected=Expected()), open_backend("cpu"))
    assert not any(followed.words.values())

"""What a capture refuses: reads by the host, sizes from values, data of the host, seeds, what nobody can look into."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from tests.conformance.cases import WRONG, Base, hazard, two_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils.checkpoint import checkpoint

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.backends import open_backend

host_sync = {"audit": "host-sync", "capture": "host-sync"}
dynamic_shape = {"audit": "dynamic-shape", "capture": "dynamic-shape"}
host_data = {"audit": "host-data", "capture": "host-data"}
rng = {"audit": "rng", "capture": "rng"}


@hazard(1, **host_sync)
class BranchOnValue(Base):
    def forward(self, x):
        if x.sum() > 0:  # HERE
            return self.linear(x)
        return -x


@hazard(1, **host_sync)
class Item(Base):
    def forward(self, x):
        return x * x.max().item()  # HERE


@hazard(1, **host_sync)
class FloatOfTensor(Base):
    def forward(self, x):
        return x * float(x.max())  # HERE


@hazard(1, **host_sync)
class NumberInText(Base):
    def forward(self, x):
        self.told = f"{x.max():.2f}"  # HERE
        return self.linear(x)


@hazard(1, **host_sync)
class LoopUntil(Base):
    def forward(self, x):
        while x.norm() > 1:  # HERE
            x = x / 2
        return x


@hazard(1, **host_sync)
class Assertion(Base):
    def forward(self, x):
        assert (x == x).all()  # HERE
        return self.linear(x)


@hazard(1, **host_sync)
class NanGuard(Base):
    def forward(self, x):
        y = self.linear(x)
        if torch.isnan(y).any():  # HERE
            raise ValueError("NaN")
        return y


@hazard(1, **host_sync)
class ListByValue(Base):
    scales = (1.0, 2.0, 3.0, 4.0)

    def forward(self, x):
        return x * self.scales[int(x[0].argmax())]  # HERE


@hazard(1, **host_sync)
class OneHotOfMaximum(Base):
    def forward(self, x):
        index = x.argmax(-1)
        return F.one_hot(index, int(index.max()) + 1)  # HERE


@hazard(1, **host_sync)
class FillWithTensor(Base):
    def forward(self, x):
        return x.masked_fill(x > 0, x[0, 0])  # HERE


@hazard(1, **host_sync)
class OpenHistogram(Base):
    def forward(self, x):
        return torch.histc(x, 4) + x.sum(0)  # HERE


@hazard(1, **host_sync)
class RangeOfTensor(Base):
    def forward(self, x):
        return x.sum() + torch.arange(x[0].argmax() + 1, device=x.device).sum()  # HERE


@hazard(1, **host_sync)
class BranchOfTorch(Base):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))  # HERE


@hazard(2, **host_sync)
class ToList(Base):
    def forward(self, x):
        return x * sum(x[0].tolist())  # HERE


@hazard(2, **host_sync)
class Numpy(Base):
    def forward(self, x):
        return x * float(x.numpy()[0, 0])  # HERE


@hazard(2, **host_sync)
class AsArray(Base):
    def forward(self, x):
        return x * float(np.asarray(x).sum())  # HERE


@hazard(2, **host_sync)
class ToCpu(Base):
    def forward(self, x):
        return self.linear(x.cpu().to(x.device))  # HERE


@hazard(2, **host_sync)
class ToCpuByName(Base):
    def forward(self, x):
        return self.linear(x.to("cpu").to(x.device))  # HERE


@hazard(2, **host_sync)
class ToCpuByKeyword(Base):
    def forward(self, x):
        return self.linear(x.to(device="cpu", dtype=torch.float32).to(x.device))  # HERE


@hazard(1, 5, audit="host-data+host-sync", capture="host-data")
class WindowOfTheHost(Base):
    @staticmethod
    def inputs():
        return torch.randn(2, 33, 17, dtype=torch.complex64)

    def forward(self, z):
        window = torch.hann_window(64).to(z.real)  # HERE
        return torch.istft(z, 64, 16, window=window)  # HERE


@hazard(2, **host_sync)
class Printing(Base):
    def forward(self, x):
        str(x)  # HERE
        return self.linear(x)


@hazard(7, **host_sync)
class SliceBound(Base):
    def forward(self, x):
        return x[: x[:, 0].argmax() + 1].sum(0)  # HERE


@hazard(7, **host_sync)
class NarrowByTensor(Base):
    def forward(self, x):
        return x.narrow(1, x[0].argmax() % 2, 2) * 2  # HERE


@hazard(7, **host_sync)
class LoopBound(Base):
    def forward(self, x):
        for _ in range(x[0].argmax()):  # HERE
            x = self.linear(x)
        return x + 1


@hazard(8, **host_sync)
class Equal(Base):
    def forward(self, x):
        return x + 1 if torch.equal(x, self.linear(x)) else -x  # HERE


@hazard(8, **host_sync)
class AllClose(Base):
    def forward(self, x):
        return x + 1 if torch.allclose(x, self.linear(x)) else -x  # HERE


@hazard(8, **host_sync)
class InList(Base):
    def forward(self, x):
        return x + (x.max() in [x.min()])  # HERE


@hazard(8, **host_sync)
class PythonMaximum(Base):
    def forward(self, x):
        return x * max(x[0, 0], x[0, 1])  # HERE


@hazard(9, **host_sync)
class Inverse(Base):
    def forward(self, x):
        return torch.linalg.inv(torch.eye(4, device=x.device) + x.T @ x)  # HERE


@hazard(9, **host_sync)
class Cholesky(Base):
    def forward(self, x):
        return torch.linalg.cholesky(torch.eye(4, device=x.device) + x.T @ x)  # HERE


@hazard(9, **host_sync)
class Solve(Base):
    def forward(self, x):
        return torch.linalg.solve(torch.eye(4, device=x.device) + x.T @ x, x.T)  # HERE


@hazard(9, **host_sync)
class PowerOfInverse(Base):
    """The model's own inference mode keeps composite operations whole."""

    @torch.inference_mode()
    def forward(self, x):
        return torch.linalg.matrix_power(torch.eye(4, device=x.device) + x.T @ x, -1)  # HERE


@hazard(9, **host_sync)
class SpectralNorm(Base):
    @torch.inference_mode()
    def forward(self, x):
        return x / torch.linalg.matrix_norm(x, 2)  # HERE


@hazard(9, **host_sync)
class NuclearNorm(Base):
    @torch.inference_mode()
    def forward(self, x):
        return x / torch.norm(x, p="nuc")  # HERE


@hazard(1, **host_sync)
class Waveform(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))

    @staticmethod
    def inputs():
        return torch.randn(2, 64)

    @torch.inference_mode()
    def forward(self, x):
        spectrum = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        return torch.istft(spectrum, 16, 4, window=self.window, length=64)  # HERE


@hazard(9, **host_sync)
class EigenValues(Base):
    def forward(self, x):
        return torch.linalg.eigvalsh(x.T @ x)  # HERE


def without_a_gpu():
    """A machine without a GPU has nothing to synchronise and raises; here the call does nothing instead."""
    absent = not torch.cuda.is_available()
    return mock.patch.object(torch.cuda, "synchronize", autospec=True) if absent else contextlib.nullcontext()


@hazard(10, **host_sync, around=without_a_gpu)
class Synchronise(Base):
    def forward(self, x):
        y = self.linear(x)
        torch.cuda.synchronize()  # HERE
        return y


@hazard(3, **dynamic_shape)
class MaskRead(Base):
    def forward(self, x):
        return x[x > 0] * 2  # HERE


@hazard(3, **dynamic_shape)
class MaskedSelect(Base):
    def forward(self, x):
        return x.masked_select(x > 0).sum()  # HERE


@hazard(3, **dynamic_shape)
class NonZero(Base):
    def forward(self, x):
        return x.nonzero() + 1  # HERE


@hazard(3, **dynamic_shape)
class WhereWithOneArgument(Base):
    def forward(self, x):
        return torch.where(x > 0)[0] + 1  # HERE


@hazard(3, **dynamic_shape)
class ArgWhere(Base):
    def forward(self, x):
        return torch.argwhere(x > 0) + 1  # HERE


@hazard(3, **dynamic_shape)
class Unique(Base):
    def forward(self, x):
        return x.unique() + 1  # HERE


@hazard(3, **dynamic_shape)
class UniqueInARow(Base):
    def forward(self, x):
        return torch.unique_consecutive(x) + 1  # HERE


@hazard(3, **dynamic_shape)
class BinCount(Base):
    def forward(self, x):
        return torch.bincount(x.argmax(-1), minlength=4) + 1  # HERE


@hazard(3, **dynamic_shape)
class Sparse(Base):
    def forward(self, x):
        return x.to_sparse().values() + 1  # HERE


@hazard(4, **dynamic_shape)
class MaskWrite(Base):
    def forward(self, x):
        y = x.clone()
        y[x > 0] = x[0, 0]  # HERE
        return y


@hazard(4, **dynamic_shape)
class RowsByMask(Base):
    def forward(self, x):
        y = x.clone()
        y[x[:, 0] > 0] = self.linear.bias  # HERE
        return y


@hazard(4, **dynamic_shape)
class AddToMask(Base):
    def forward(self, x):
        y = x.clone()
        y[x > 0] += 1  # HERE
        return y


@hazard(40, **dynamic_shape)
class TokensOfExpert(Base):
    def forward(self, x):
        y = torch.zeros_like(x)
        tokens = (x.argmax(-1) == 0).nonzero()[:, 0]  # HERE
        return y.index_add_(0, tokens, self.linear(x[tokens]))


@hazard(40, **host_sync)
class CapacityOfExpert(Base):
    def forward(self, x):
        load = (x.argmax(-1) == 0).sum()
        capacity = int(load) + 1  # HERE
        return self.linear(x[:capacity])


@hazard(6, **dynamic_shape)
class RepeatInterleave(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("repeats", torch.ones(4, dtype=torch.int64))

    def forward(self, x):
        return x.repeat_interleave(self.repeats, 1) + 1  # HERE


@hazard(5, **host_data)
class HostList(Base):
    def forward(self, x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # HERE


@hazard(5, **host_data)
class NewTensor(Base):
    def forward(self, x):
        return x * x.new_tensor([1.0, 2.0, 3.0, 4.0])  # HERE


@hazard(5, **host_data)
class ArrayAsTensor(Base):
    def forward(self, x):
        return x * torch.as_tensor(np.ones(4, np.float32), device=x.device)  # HERE


@hazard(5, **host_data)
class ListIndex(Base):
    def forward(self, x):
        return x[:, [0, 2]] + 1  # HERE


@hazard(5, **host_data)
class ArrayIndex(Base):
    def forward(self, x):
        return x[:, np.array([0, 2])] + 1  # HERE


@hazard(5, **host_data)
class WriteAtList(Base):
    def forward(self, x):
        y = x.clone()
        y[:, [0, 2]] = self.linear(x)[:, :2]  # HERE
        return y


@hazard(5, **host_data)
class NumberAtIndices(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.arange(2))

    def forward(self, x):
        y = x.clone()
        y[self.index] = 0.0  # HERE
        return y


@hazard(5, **host_data)
class NumberOnDevice(Base):
    def forward(self, x):
        return x * torch.tensor(2.0, device=x.device)  # HERE


@hazard(5, **host_data)
class NumberOnDeviceByOptions(Base):
    def forward(self, x):
        return x * torch.tensor(0.5, **self.options(x))  # HERE

    def options(self, x):
        return {"device": x.device, "dtype": x.dtype}


@hazard(5, **host_data)
class NumberSentToDevice(Base):
    def forward(self, x):
        return x * torch.tensor(2.0).to(x.device)  # HERE


@hazard(5, **host_data)
class NumberSentToTensor(Base):
    def forward(self, x):
        return x * torch.tensor(2.0).to(x)  # HERE


collective = {"audit": "collective", "capture": "collective", "around": two_ranks}


@hazard(53, **collective)
class SummedOverRanks(Base):
    def forward(self, x):
        y = self.linear(x)
        dist.all_reduce(y)  # HERE
        return y


@hazard(53, **collective)
class GatheredFromRanks(Base):
    def forward(self, x):
        y = self.linear(x)
        rows = [torch.empty_like(y), torch.empty_like(y)]
        dist.all_gather(rows, y)  # HERE
        return torch.cat(rows)


@hazard(53, **collective)
class FunctionalSumOverRanks(Base):
    def forward(self, x):
        y = functional_collectives.all_reduce(self.linear(x), "sum", dist.group.WORLD)  # HERE
        return y * 2


@hazard(23, audit="nested-graph")
class RunnerInside(Base):
    """A runner gives a capture the operations of its model. Called eagerly it replays."""

    def __init__(self):
        super().__init__()
        x = torch.randn(4, 4)
        self.runner = GraphRunner(nn.Linear(4, 4).eval(), x, batch_sizes=(2, 4), device=x.device.type)

    def forward(self, x):
        return self.runner(x) * 2  # HERE


@hazard(23, audit="nested-graph", capture="nested-graph")
class GraphInside(Base):
    def __init__(self):
        super().__init__()
        x = torch.randn(2, 4)
        self.pool = open_backend(x.device.type).pool()
        self.graph = self.pool.capture(self.linear, (x,), {}, batch_size=2)

    def forward(self, x):
        return self.graph(x[:2]) * 2  # HERE


@hazard(32, **host_data)
class CopyWithoutWaiting(Base):
    def forward(self, x):
        y = torch.empty_like(x)
        y.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]), non_blocking=True)  # HERE
        return x + y


@hazard(15, **rng)
class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator(self.linear.weight.device)

    def forward(self, x):
        return x + torch.rand(4, generator=self.generator, device=x.device)  # HERE


@hazard(16, **rng)
class Reseeding(Base):
    def forward(self, x):
        torch.manual_seed(0)  # HERE
        return x + torch.rand(4, device=x.device)


@hazard(16, **rng)
class RngState(Base):
    def forward(self, x):
        torch.get_rng_state()  # HERE
        return self.linear(x)


@hazard(16, **rng)
class ForkedRng(Base):
    def forward(self, x):
        with torch.random.fork_rng():  # HERE
            return x + torch.rand(4, device=x.device)


@hazard(16, **rng)
class Checkpoint(Base):
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=False)  # HERE


@hazard(1, **host_sync)
class SwallowedRefusal(Base):
    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            return x * x.max().item()  # HERE
        return x + 1


@hazard(1, **host_sync)
class ReadTwoCallsDeep(Base):
    def scale(self, x):
        return self.largest(x) * 2

    def largest(self, x):
        return float(x.max())  # HERE

    def forward(self, x):
        return x * self.scale(x)


@hazard(1, **host_sync)
class ReadAtTheEnd(Base):
    def forward(self, x):
        try:
            return self.linear(x)
        finally:
            math.sqrt(x.abs().sum())  # HERE


@hazard(1, **host_sync)
class ReadThroughStorage(Base):
    def forward(self, x):
        return x * float(x.untyped_storage()[3])  # HERE


@hazard(1, audit="host-sync")
class OnlyOnCuda(Base):
    def forward(self, x):
        if x.is_cuda:
            return x * x.max().item()  # HERE
        return self.linear(x)


@hazard(2, **host_sync)
class ToCpuByObject(Base):
    def forward(self, x):
        return self.linear(x.to(torch.device("cpu")).to(x.device))  # HERE


@hazard(21, **host_data)
class HostConstant(Base):
    def forward(self, x):
        return x * torch.ones(4, device="cpu")  # HERE


@hazard(5, 21, **host_data)
class HostIndex(Base):
    def forward(self, x):
        return x[:, torch.arange(2, device="cpu")] + 1  # HERE


@hazard(5, **host_data)
class EmbeddingOfSteps(Base):
    """A diffusion model's sinusoidal embedding, made on the host in each call."""

    def forward(self, x):
        rate = torch.exp(-math.log(10000) * torch.arange(4, dtype=torch.float32) / 4)
        rate = rate.to(device=x.device)  # HERE
        return torch.cos(x * rate[None])


@hazard(5, **host_data)
class IndexPerRow(Base):
    """CLIP takes the features at the last token of each row."""

    def forward(self, x):
        return x[torch.arange(x.shape[0]), x.argmax(-1)] * 2  # HERE


@hazard(5, **host_data)
class RowsOfAMask(Base):
    """Informer takes the rows of a mask whose place a CPU cannot tell."""

    def forward(self, x):
        mask = torch.ones(4, 4, device=x.device)
        rows = torch.arange(4)
        return x @ mask[rows, x[0].argsort()].diag()  # HERE


@hazard(5, **host_data)
class RelativePositions(Base):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7))

    def forward(self, x):
        steps = torch.arange(4)
        distance = steps[:, None] - steps[None, :]
        return x @ self.table[distance + 3]  # HERE


@hazard(5, notes=("rng",), **host_data)
class SampledKeys(Base):
    """Informer draws the keys of its attention on the host."""

    def forward(self, x):
        return x[:, torch.randint(4, (2,))] + 1  # HERE


@hazard(5, **host_data)
class ArraySentToDevice(Base):
    def forward(self, x):
        return x * torch.from_numpy(np.ones(4, np.float32)).to(x.device)  # HERE


def positions(count, device=None):
    return torch.arange(count, device=device, dtype=torch.float32)  # HERE


@hazard(21, **host_data)
class DeviceNotPassed(Base):
    """The line that makes the tensor is named by the audit, and the line that takes it by the capture."""

    def forward(self, x):
        return x * positions(4)  # HERE


@hazard(21, **host_data)
class HostRowAppended(Base):
    def forward(self, x):
        return torch.cat([x, torch.zeros(1, 4)]).sum(0)  # HERE


@hazard(2, **host_sync)
class CollectedOnTheHost(Base):
    def forward(self, x):
        rows = torch.zeros(x.shape)
        rows[0] = self.linear(x)[0]  # HERE
        return rows * 2


@hazard(26, 42, audit="rng", check=WRONG)
class NumberDrawnOnTheHost(Base):
    def forward(self, x):
        return x * torch.rand(())  # HERE


@hazard(26, 42, audit="rng", check=WRONG)
class NumberDrawnAndRead(Base):
    def forward(self, x):
        return x * torch.rand(1).item()  # HERE


@hazard(1, **host_sync)
class OnlyLargeBatches(Base):
    """The audit looks at another batch size too: the branch is not taken at the smallest."""

    def forward(self, x):
        if x.shape[0] > 2:
            return x * x.max().item()  # HERE
        return self.linear(x)


@hazard(22, audit="host-sync", notes=("unknown-op",))
class OperatorThatReads(Base):
    def forward(self, x):
        return torch.ops.cudagraph_conformance.reads(x)  # HERE


LIBRARY = torch.library.Library("cudagraph_conformance", "DEF")
LIBRARY.define(
    "unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
)
LIBRARY.define("reads(Tensor x) -> Tensor")
LIBRARY.impl("reads", lambda x: x * x.max().item(), "CompositeExplicitAutograd")  # HERE
LIBRARY.impl("unsafe", lambda x: x * 2, "CompositeExplicitAutograd")


@hazard(22, audit="unknown-op", capture="unknown-op", exists=hasattr(torch.Tag, "cudagraph_unsafe"))
class UnsafeOperator(Base):
    def forward(self, x):
        return torch.ops.cudagraph_conformance.unsafe(x)  # HERE


@hazard(48, capture="refused", notes=("output-alias",))
class NothingLaunched(Base):
    def forward(self, x):
        return x.view(-1)


@hazard(17, audit="rng", capture="control-flow", slow=True)
class CompilesInCapture(Base):
    """Each call hands torch.compile a function it has not seen: no warm-up can have compiled it."""

    def forward(self, x):
        names = {}
        exec("def plus_one(x): return x + 1", names)
        return torch.compile(names["plus_one"], backend="eager")(x)  # HERE

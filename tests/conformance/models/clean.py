"""Look-alikes: they stand close to a hazard, CUDA captures them, and no stage may say a word."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tests.conformance.cases import Base, clean, is_capturing, two_ranks
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_cudagraph import GraphRunner


@clean()
class IntegerIndex(Base):
    def forward(self, x):
        return x[:, x.argmax(-1) % 2] + self.linear(x)[:, :1]


@clean()
class RowByTensor(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(3, -1, -1))

    def forward(self, x):
        return x[:, self.order] + x.index_select(1, self.order)


@clean()
class NumberUnderMask(Base):
    def forward(self, x):
        y = x.clone()
        y[x > 0] = 0.0
        return y


@clean()
class MaskedFill(Base):
    def forward(self, x):
        return x.masked_fill(x < 0, float("-inf")).softmax(-1).masked_fill(x > 2, 0)


@clean()
class Where(Base):
    def forward(self, x):
        return torch.where(x > 0, x, 0.0) + torch.where(x > x.mean(), self.linear(x), x)


@clean()
class OneHot(Base):
    def forward(self, x):
        return F.one_hot(x.argmax(-1), 4) * x


@clean()
class TopK(Base):
    def forward(self, x):
        values, places = x.topk(2)
        return torch.zeros_like(x).scatter(1, places, values)


@clean()
class Sorted(Base):
    def forward(self, x):
        values, order = x.sort(-1, descending=True)
        return values.cumsum(-1).gather(1, order.argsort(-1))


@clean()
class ScatterAdd(Base):
    def forward(self, x):
        places = x.argsort(-1)
        return torch.zeros_like(x).scatter_add_(1, places, x).index_add_(0, x[:, 0].argsort(), x)


@clean()
class DropoutInEval(Base):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.dropout(self.linear(x)), 0.5, self.training)


@clean()
class BatchNormInEval(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)


@clean()
class AttentionWithoutDropout(Base):
    def forward(self, x):
        query = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)[0, 0]


@clean()
class AttentionWithMask(Base):
    def forward(self, x):
        rows = x[None, None]
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)[0, 0]


@clean()
class MadeOnTheDevice(Base):
    def forward(self, x):
        steps = torch.arange(4, device=x.device, dtype=x.dtype)
        return x * steps + torch.full((4,), 0.5, device=x.device) + torch.linspace(0, 1, 4, device=x.device)


@clean()
class LikeTheInput(Base):
    def forward(self, x):
        return torch.zeros_like(x) + x.new_ones(4) + torch.empty_like(x).fill_(3) * x


@clean()
class EmptyListOnDevice(Base):
    def forward(self, x):
        nothing = torch.tensor([], device=x.device)
        return torch.cat([x.flatten(), nothing])


@clean()
class CatOfFixedShapes(Base):
    def forward(self, x):
        return torch.cat([x, self.linear(x)], -1) + torch.stack([x, x], 1).flatten(1)


@clean()
class OwnTemporaryInPlace(Base):
    def forward(self, x):
        y = self.linear(x)
        y.relu_().mul_(2).add_(x)
        y[:, 0] = 0
        y[:, 1:3] *= 2
        return y


@clean()
class ViewsOfOwn(Base):
    def forward(self, x):
        y = self.linear(x)
        return y.view(-1), y.T, y[:, 1:]


@clean()
class KeywordArguments(Base):
    @staticmethod
    def inputs():
        return ()

    @staticmethod
    def keywords():
        return {"x": torch.randn(2, 4), "scale": 2.0, "residual": True, "mask": None}

    def forward(self, *, x, scale=1.0, residual=False, mask=None):
        y = self.linear(x) * scale
        y = y + x if residual else y
        return y if mask is None else y * mask


@clean()
class DictOfOutputs(Base):
    def forward(self, x):
        return {"logits": self.linear(x), "hidden": [x * 2, (x + 1,)], "size": 4, "none": None}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@clean()
class NamedTuples(Base):
    @staticmethod
    def inputs():
        return (Pair(torch.randn(2, 4), torch.randn(2, 4)),)

    def forward(self, pair):
        return Pair(self.linear(pair.left), pair.right * 2)


@clean()
class NestedInputs(Base):
    @staticmethod
    def inputs():
        return ({"x": torch.randn(2, 4), "more": [torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)]},)

    def forward(self, batch):
        return self.linear(batch["x"]) + torch.where(batch["more"][1], batch["more"][0], 0)


@clean()
class TakesItsInputsOut(Base):
    @staticmethod
    def inputs():
        return ({"x": torch.randn(2, 4), "labels": torch.tensor([1, 0])},)

    def forward(self, batch):
        batch.pop("labels")
        return self.linear(batch.pop("x"))


@clean()
class BranchOnShape(Base):
    def forward(self, x):
        if x.shape[0] > 2 and len(x) > 2 and x.is_floating_point() and not self.training:
            return self.linear(x)
        return self.linear(x) + x.size(0)


@clean()
class LoopOverLayers(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scales = (1.0, 0.5, 0.25)

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + layer(x).tanh() * scale
        return x


@clean(notes=("host-data",))
class NumberOfPython(Base):
    def forward(self, x):
        return x * torch.tensor(0.5) + torch.clamp(x, min=-1.0) ** 2  # HERE


@clean()
class MaskFromLengths(Base):
    @staticmethod
    def inputs():
        return torch.randn(2, 4), torch.tensor([3, 1])

    def forward(self, x, lengths):
        mask = torch.arange(4, device=x.device)[None] < lengths[:, None]
        return self.linear(x) * mask


@clean()
class RepeatsWithSize(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("repeats", torch.tensor([1, 2, 1, 2]))

    def forward(self, x):
        return x.repeat_interleave(self.repeats, 1, output_size=6)[:, :4] + x.repeat_interleave(2, 1)[:, :4]


@clean()
class InverseUnchecked(Base):
    def forward(self, x):
        inverse, _ = torch.linalg.inv_ex(torch.eye(4, device=x.device) + x.T @ x)
        factor, _ = torch.linalg.cholesky_ex(torch.eye(4, device=x.device) + x.T @ x)
        return inverse + factor


@clean()
class AssertionOnTheDevice(Base):
    def forward(self, x):
        torch._assert_async((x == x).all())
        return self.linear(x)


@clean()
class CheckpointWithoutSeed(Base):
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=False, preserve_rng_state=False)


@clean()
class CaptureAwareAlike(Base):
    def forward(self, x):
        return self.linear(x) + 1 if is_capturing() else self.linear(x).add_(1)


@clean()
class HookThatChangesTheOutput(Base):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        return self.linear(x)


@clean()
class TiedWeights(Base):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    @staticmethod
    def inputs():
        return torch.tensor([[1, 5], [7, 0]])

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@clean()
class Parametrised(Base):
    def __init__(self):
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.normed(x)


@clean()
class Rotary(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("rate", 1.0 / (10.0 ** torch.arange(0, 1, 0.5)), persistent=False)

    def forward(self, x):
        angle = torch.arange(x.shape[0], device=x.device)[:, None] * self.rate
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


@clean()
class WeightsChangedInPlaceLater(Base):
    def forward(self, x):
        return self.linear(x)

    def after_capture(self):
        with torch.no_grad():
            self.linear.weight.mul_(2)
        self.load_state_dict({name: tensor + 1 for name, tensor in self.state_dict().items()})


@clean()
class Casts(Base):
    def forward(self, x):
        half = x.to(torch.bfloat16) * 2
        return half.float() + x.double().to(x) + x.to(x.device).type_as(half).float()


@clean()
class ReadsItsConfiguration(Base):
    def __init__(self):
        super().__init__()
        self.config = {"activation": "gelu", "eps": 1e-6, "names": ["a", "b"]}

    def forward(self, x):
        y = F.gelu(x) if self.config["activation"] == "gelu" else F.relu(x)
        return F.rms_norm(self.linear(y), (4,), eps=self.config["eps"]) * len(self.config["names"])


@clean()
class PoolsAndPads(Base):
    @staticmethod
    def inputs():
        return torch.randn(2, 3, 8, 8)

    def forward(self, x):
        y = F.interpolate(F.pad(x, (1, 1, 1, 1)), scale_factor=2.0, mode="bilinear")
        return F.adaptive_avg_pool2d(y, 4) + F.max_pool2d(x, 2)


@clean()
class Einsum(Base):
    def forward(self, x):
        return torch.einsum("bi,ij->bj", x, self.linear.weight).roll(1, 0).flip(-1)


@clean()
def convolutions():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers).eval(), (torch.randn(2, 3, 8, 8),), {}


@clean()
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (torch.randn(2, 5, 16),), {}


@clean()
def transformer_in_training_mode_without_dropout():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return layer.train(), (torch.randn(2, 5, 16),), {}


@clean()
def lstm():
    return nn.LSTM(4, 5, 2, batch_first=True).eval(), (torch.randn(2, 6, 4),), {}


@clean()
def gru():
    return nn.GRU(4, 5, batch_first=True, bidirectional=True).eval(), (torch.randn(2, 6, 4),), {}


@clean()
def embedding_bag():
    return nn.EmbeddingBag(10, 4).eval(), (torch.tensor([[1, 2], [3, 9]]),), {}


@clean()
def self_attention():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)

    return Attends().eval(), (torch.randn(2, 5, 8),), {}


@clean()
class TensorOnOwnStorage(Base):
    def forward(self, x):
        y = self.linear(x)
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(y.untyped_storage(), 0, (4,)) + x


@clean()
class ItsOwnDevice(Base):
    """A device that is held is the model's own, whatever its name is on this machine."""

    def __init__(self):
        super().__init__()
        self.device = self.linear.weight.device
        self.place = str(self.device)

    def forward(self, x):
        x = x.to(self.device).to(self.place)
        return self.linear(x) * torch.ones(4, device=self.device) + torch.zeros(4, device=self.place)


@clean()
class DeviceThatIsThere(Base):
    def forward(self, x):
        there = x.to("cuda" if torch.cuda.is_available() else "cpu")
        return self.linear(there) * torch.ones(4, device="cuda" if torch.cuda.is_available() else "cpu")


@clean()
class NumberOfTheHost(Base):
    """A number is taken by value, and what stays on the host meets no tensor of the device."""

    def forward(self, x):
        shape = torch.zeros(4, device="cpu").shape
        return self.linear(x) * torch.ones((), device="cpu") + shape[0]


@clean()
class StepsOfTheHost(Base):
    """A schedule that the host makes and reads, with and without naming it."""

    def forward(self, x):
        for step in torch.linspace(0, 9, steps=3).int().tolist():
            x = x * 0.5 + step
        return x * float(torch.arange(3, device="cpu").cpu().to("cpu").numpy().sum())


@clean()
class SizeOfTheHost(Base):
    def forward(self, x):
        size = torch.tensor(x.shape[-2:])
        return x / float(size.max()) if size.sum() > 1 else x


@clean()
class SizesOfTheHost(Base):
    """Sizes that depend on values of the host are known to it."""

    def forward(self, x):
        steps = torch.arange(6)
        return x * len(steps[steps > 2].unique()) + len(steps.nonzero())


@clean()
class NumberOfTheHostChanged(Base):
    """A number is taken by value, whatever the host writes there later."""

    def forward(self, x):
        scale = torch.ones(())
        y = x * scale
        scale += 1
        y = y * scale
        scale += 5
        return y


@clean()
class CutAtHostSizes(Base):
    def forward(self, x):
        return x.tensor_split(torch.arange(1, 3), 1)[1] * 2 + x.narrow(1, torch.ones((), dtype=torch.int64), 1)


@clean()
class PackedByHostLengths(Base):
    @staticmethod
    def inputs():
        return torch.randn(2, 3, 4)

    def forward(self, x):
        lengths = torch.full((x.shape[0],), 3)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0] * 2


@clean()
class DevicePassedOn(Base):
    def forward(self, x):
        options = {"device": x.device, "dtype": x.dtype}
        return x * torch.ones(4, **options) + positions(4, x.device)


def positions(count, device=None):
    return torch.arange(count, device=device)


@clean()
class Quantile(Base):
    """A CPU checks the fractions, and CUDA does not."""

    @torch.inference_mode()
    def forward(self, x):
        return torch.quantile(x, torch.full((2,), 0.5, device=x.device), 1).T + F.one_hot(x.argmax(-1), 2 + 2)[:, :2]


@clean()
class OtherKernelOnCuda(Base):
    def forward(self, x):
        if x.is_cuda:
            return F.linear(x, self.linear.weight, self.linear.bias)
        return x @ self.linear.weight.T + self.linear.bias


@clean(notes=("stateful-python",))
class TimedForALog(Base):
    """Clocks that only measure, a time that was given, and a branch on what stays."""

    calls, spent_s = 3, 0.0

    def forward(self, x):
        started, begun = time.perf_counter(), time.time()
        y = self.linear(x)
        self.spent_s += max(time.perf_counter() - started, time.time() - begun)
        log.debug("%s: %s s", time.strftime("%H:%M:%S", time.gmtime(0)), self.spent_s)
        return y if self.calls == 3 and log.name else y + 1


log = logging.getLogger(__name__)


@clean()
class MovedToItsDevice(Base):
    def forward(self, x):
        return self.linear.to(x.device)(x)


@clean()
class CastToItsType(Base):
    def forward(self, x):
        return self.linear.float()(x)


@clean()
class DataAssignedToItself(Base):
    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data.contiguous()
        return self.linear(x)


@clean()
class ParameterOfTheSameMemory(Base):
    def forward(self, x):
        self.linear.weight = nn.Parameter(self.linear.weight.detach(), requires_grad=True)
        return self.linear(x)


class _Uncounted(tuple):
    def __len__(self):
        raise NotImplementedError


class _Fraction:
    __slots__ = ("numerator",)


class _One(_Fraction):
    __slots__ = ()
    numerator = 1


@clean()
class OddAttributes(Base):
    """As irreps of e3nn and numbers of sympy."""

    def __init__(self):
        super().__init__()
        self.irrep, self.one = _Uncounted((2, 3)), _One()

    def forward(self, x):
        return self.linear(x)


@clean(around=two_ranks)
class AsksForItsRank(Base):
    """One of two ranks, but no collective: as a loss that only rank 0 logs, or a shard of the weights."""

    def __init__(self):
        super().__init__()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def forward(self, x):
        rows = self.linear(x).tensor_split(self.ranks, dim=1)[self.rank]
        return rows if dist.get_rank() == 0 else rows * 2


@clean(around=two_ranks)
class CollectiveInTrainingOnly(Base):
    """As batch normalisation over ranks, which in evaluation uses what it has saved."""

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            dist.all_reduce(y)
        return y


@clean()
class HoldsAGraphForLater(Base):
    """A server's model that keeps a runner beside its eager code."""

    def __init__(self):
        super().__init__()
        x = torch.randn(4, 4)
        self.runner = GraphRunner(nn.Linear(4, 4).eval(), x, batch_sizes=(4,), device=x.device.type)

    def forward(self, x):
        return self.linear(x) * 2


@clean()
class UsesItsGraphForOneRowOnly(HoldsAGraphForLater):
    def forward(self, x):
        return self.runner(x) if x.shape[0] == 1 else self.linear(x) * 2

"""Collectives of torch.distributed on the twin: operations of the graph with one rank, refused with two real ones."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from tests.conformance.cases import Base, Case, Expected, rows_of_numbers
from tests.conformance.stages import run
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import CaptureRefusal

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


class Doubles(Base):
    """Its collective has one rank, so that the linear layer is seen alone, times two."""

    def forward(self, x):
        return 2 * self.joined(self.linear(x))


class Summed(Doubles):
    def joined(self, y):
        dist.all_reduce(y)
        return y


class SummedLater(Doubles):
    def joined(self, y):
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y


class Broadcast(Doubles):
    def joined(self, y):
        dist.broadcast(y, 0)
        return y


class GatheredInAList(Doubles):
    def joined(self, y):
        rows = [torch.empty_like(y)]
        dist.all_gather(rows, y)
        return torch.cat(rows)


class Gathered(Doubles):
    def joined(self, y):
        rows = torch.empty_like(y)
        dist.all_gather_into_tensor(rows, y)
        return rows


class Scattered(Doubles):
    def joined(self, y):
        rows = torch.empty_like(y)
        dist.scatter(rows, [y], src=0)
        return rows


class Exchanged(Doubles):
    def joined(self, y):
        rows = torch.empty_like(y)
        dist.all_to_all_single(rows, y)
        return rows


class FunctionalSum(Doubles):
    def joined(self, y):
        return functional.wait_tensor(functional.all_reduce(y, "sum", dist.group.WORLD))


class FunctionalSumNotWaitedFor(Doubles):
    def joined(self, y):
        return functional.all_reduce(y, "sum", dist.group.WORLD)


class FunctionalGather(Doubles):
    def joined(self, y):
        return functional.all_gather_tensor(y, 0, dist.group.WORLD)


def stages_of(build):
    return run(Case(name="collective", build=build, expected=Expected()), open_backend("cpu"))


KINDS = (
    Summed, SummedLater, Broadcast, GatheredInAList, Gathered, Scattered, Exchanged,
    FunctionalSum, FunctionalSumNotWaitedFor, FunctionalGather,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_one_rank_is_an_operation_that_a_replay_repeats(kind):
    seen = stages_of(lambda: (kind().eval(), (rows_of_numbers(),), {}))
    assert seen.verdict == "clean"


@pytest.mark.parametrize("kind", KINDS)
def test_the_receipt_counts_it_and_its_result_is_that_of_the_call(kind):
    model, x, another = kind().eval(), rows_of_numbers(), rows_of_numbers()
    with open_backend("cpu").pool() as pool, torch.inference_mode():
        graph = pool.capture(model, (x,), {}, batch_size=2)
        replayed = graph(another).clone()
        assert any("c10d" in name for name in graph.receipt.kernel_names), graph.receipt.kernel_names
        torch.testing.assert_close(replayed, 2 * model.linear(another))


class WithStatistics(nn.Module):
    """DistributedDataParallel sends the buffers of such a model round before each call."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def distributed_data_parallel():
    return nn.parallel.DistributedDataParallel(WithStatistics()).eval()


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@pytest.mark.parametrize("parallel", [distributed_data_parallel, tensor_parallel])
def test_a_parallel_model_of_one_rank_is_judged_by_its_operations(parallel):
    seen = stages_of(lambda: (parallel(), (rows_of_numbers(),), {}))
    assert seen.words == dict.fromkeys(seen.words)
    assert not seen.audit.errors
    assert not seen.audit.not_judged


class Unfinished(Base):
    def forward(self, x):
        return functional.all_reduce(self.linear(x), "sum", dist.group.WORLD)


def test_an_output_that_nobody_has_waited_for_is_refused_in_plain_words():
    with open_backend("cpu").pool() as pool, pytest.raises(CaptureRefusal, match="output of class AsyncColl") as caught:
        pool.capture(Unfinished().eval(), (rows_of_numbers(),), {}, batch_size=2)
    assert "wait() of an AsyncCollectiveTensor" in caught.value.fix


class Barrier(Base):
    def forward(self, x):
        dist.barrier()
        return self.linear(x)


def test_the_host_waits_for_a_barrier():
    seen = stages_of(lambda: (Barrier().eval(), (rows_of_numbers(),), {}))
    assert (seen.said("audit"), seen.said("capture")) == ("host-sync", "host-sync")


RANK = """
import sys
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def _world():
    dist.init_process_group(
        "gloo", init_method="file://{store}", rank={rank}, world_size=2, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        dist.all_reduce(y)
        return y


def test_summed(cudagraph):
    cudagraph(Summed().eval(), torch.ones(2, 4), batch_sizes=(2,))
"""


def test_two_real_ranks_are_refused_at_the_line_of_the_collective(tmp_path):
    ranks = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "test_rank.py").write_text(RANK.format(store=tmp_path / "store", rank=rank))
        options = ("-q", "-p", "no:cacheprovider", "--color=no", "--cudagraph", "--cudagraph-device=cpu")
        command = [sys.executable, "-m", "pytest", *options, "test_rank.py"]
        ranks.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in outputs:
        assert "AuditFailed: test_rank.py:27: the call waits for other processes" in text
        assert "`dist.all_reduce(y)`: c10d.allreduce_: a process group of 2 ranks, of which this test sees one" in text
        assert "fix: test one rank alone" in text

"""Work that the recorder of the CPU twin cannot see is refused where its result is used."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import CaptureRefusal

TEXT = (
    "this tensor was made during the call where the recording cannot see it: by another thread, "
    "in host memory or by compiled code. A replay would read its old values"
)


def capture(model, *args):
    with CpuBackend().pool() as pool:
        return pool.capture(model, args, {}, batch_size=2)


class Unseen(nn.Module):
    def close(self):
        """End the threads of the model."""


class InAThread(Unseen):
    def forward(self, x):
        made = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        return x + made[0]


class InAPool(Unseen):
    """The model keeps the results, so that their memory stays."""

    def __init__(self):
        super().__init__()
        self.workers = ThreadPoolExecutor(1)
        self.kept = []

    def forward(self, x):
        self.kept.append(self.workers.submit(torch.mul, x, 2).result())
        return x + self.kept[-1]

    def close(self):
        self.workers.shutdown()


class ByAQueue(Unseen):
    def __init__(self):
        super().__init__()
        self.waiting, self.done = queue.Queue(), queue.Queue()
        self.worker = threading.Thread(target=self.work)
        self.worker.start()

    def work(self):
        for x in iter(self.waiting.get, None):
            self.done.put(x * 2)

    def close(self):
        self.waiting.put(None)
        self.worker.join()

    def forward(self, x):
        self.waiting.put(x)
        return x + self.done.get(timeout=60)


class OfTheHost(Unseen):
    def forward(self, x):
        return x + torch.frombuffer(bytearray(np.ones(2, np.float32).tobytes()), dtype=torch.float32)


@pytest.mark.parametrize("model", [InAThread, InAPool, ByAQueue, OfTheHost])
def test_what_another_thread_or_the_host_has_made_is_refused_where_it_is_read(model):
    made = model()
    try:
        with pytest.raises(CaptureRefusal) as caught:
            capture(made, torch.ones(2))
    finally:
        made.close()
    assert (caught.value.text, caught.value.hazard, caught.value.operation) == (TEXT, "foreign-tensor", "aten.add")
    assert caught.value.site.file == __file__
    assert caught.value.site.function == "forward"
    assert caught.value.hazard in hazards.CATALOGUE


def test_what_compiled_code_reads_is_seen_too():
    region = CpuBackend().region(lambda x, y: x + y, "region")

    def model(x):
        made = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        return region(x, made[0])

    with pytest.raises(CaptureRefusal) as caught:
        capture(model, torch.ones(2))
    assert (caught.value.hazard, caught.value.operation) == ("foreign-tensor", "region")


def test_what_another_thread_has_made_cannot_be_an_output():
    def model(x):
        made = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        return x + 1, made[0]

    with pytest.raises(CaptureRefusal) as caught:
        capture(model, torch.ones(2))
    assert (caught.value.text, caught.value.hazard, caught.value.operation) == (TEXT, "foreign-tensor", "output")


TABLE = {}


class Lazy(nn.Module):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(2)
        return x * self.table


class Alternates(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = [torch.zeros(2), torch.ones(2)]

    def forward(self, x):
        self.tables.reverse()
        return x * self.tables[0]


class FirstUsedLater(nn.Module):
    """A buffer that the fourth call reads for the first time: it was there before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("late", torch.ones(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.late if self.calls > 3 else x + 0


class OfAGlobal(nn.Module):
    def forward(self, x):
        TABLE["last"] = TABLE.get("last", torch.zeros(2)) + x
        return x * TABLE["last"]


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        weight = self.linear.weight
        return x @ weight.data.T + weight.detach()[0] + weight.view(-1)[:2]


GLOBAL, UNTOUCHED = torch.ones(2), torch.ones(2)


class Returns(nn.Module):
    """Outputs that nothing computes: they were there before."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x + 1, x, self.weight, GLOBAL, GLOBAL[:1], UNTOUCHED, torch.tensor(2.0)


class Numbers(nn.Module):
    def forward(self, x):
        return x * torch.tensor(2.0) + torch.scalar_tensor(1.0) + torch.zeros(2, device=x.device)


class ThroughARegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = [torch.ones(2)]
        self.region = CpuBackend().region(lambda x, y: x * y, "region")

    def forward(self, x):
        return self.region(x, self.table[0])


@pytest.mark.parametrize(
    "model", [Lazy, Alternates, FirstUsedLater, OfAGlobal, Attributes, Returns, Numbers, ThroughARegion]
)
def test_what_was_there_before_the_recorded_call_is_no_stranger(model):
    capture(model(), torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("steady_from", [1, 2, 3])
def test_code_that_a_warm_up_compiles_is_captured(steady_from):
    """The later warm-ups run under a dispatch mode, and compiling below it must do no harm."""
    torch._dynamo.reset()
    calls = [0]
    linear = nn.Linear(2, 2).eval()

    @torch.compile(backend="eager")
    def compiled(x, n):
        return linear(x) * n

    def model(x):
        calls[0] += 1
        return compiled(x, min(calls[0], steady_from))

    with CpuBackend().pool() as pool:
        graph = pool.capture(model, (torch.ones(2, 2),), {}, batch_size=2)
        with torch.inference_mode():
            assert torch.equal(graph.replay(), linear(torch.ones(2, 2)) * steady_from)

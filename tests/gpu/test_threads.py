"""Other threads that use CUDA while a graph is captured."""

from __future__ import annotations

import threading

import torch
from tests.gpu.small_models import Mlp
from torch.utils.data import DataLoader, TensorDataset

ROWS = 4096


def test_a_pinning_data_loader_may_work_while_a_graph_is_captured(backend, pool):
    data = torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)
    loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=2, pin_memory=True, prefetch_factor=8)
    model = Mlp().cuda().eval()
    batches = iter(loader)
    (first,) = next(batches)
    assert first.is_pinned()
    graph = pool.capture(model, (first.cuda(),), {}, batch_size=8)
    seen = 1
    with torch.inference_mode():
        for (batch,) in batches:
            x = batch.cuda(non_blocking=True)
            if seen % 100 == 0:
                torch.testing.assert_close(graph(x), model(x))
            seen += 1
    assert seen == ROWS // 8


def test_a_thread_that_works_on_a_stream_of_its_own_neither_disturbs_nor_enters_the_graph(backend, pool):
    stop, started, laps, failed = threading.Event(), threading.Event(), [], []

    def work():
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                number = torch.zeros(1000, device=backend.device)
                while not stop.is_set():
                    number.add_(1)
                    stream.synchronize()
                    laps.append(1)
                    started.set()
        except RuntimeError as error:
            failed.append(error)
            started.set()

    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(timeout=60)
        graph = pool.capture(model, (x,), {}, batch_size=8)
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    torch.testing.assert_close(graph(x), model(x).detach())

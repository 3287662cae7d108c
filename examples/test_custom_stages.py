"""The stages one by one, for tests that need their own order or their own checks in between."""

import shutil

import pytest
import torch
from torch import nn

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler"
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).eval()


def test_capture_check_and_measure(cudagraph, capture_graphs, assert_replay_close, measure_speedup):
    # A model on the CPU would be copied to the GPU, and this test compares with the model itself.
    model = make_model().to(cudagraph.device)
    graphs = capture_graphs(model, torch.randn(1, 64, device=cudagraph.device), batch_sizes=[1, 4])

    with torch.inference_mode():
        x = torch.randn(4, 64, device=cudagraph.device)
        torch.testing.assert_close(graphs[4](x).clone(), model(x))

    assert_replay_close(graphs, rtol=1e-4, atol=1e-5)
    measure_speedup(graphs, min_speedup={1: 1.1, 4: 1.05})


@needs_compiler
def test_compiled_graph(compile_model, capture_graphs, assert_replay_close):
    compiled = compile_model(make_model(), torch.randn(1, 64), mode="inductor", batch_sizes=[8])
    graphs = capture_graphs(compiled)
    assert_replay_close(graphs)


def test_watch_the_machine(perf_monitor):
    model = make_model()
    with perf_monitor() as watch:
        model(torch.randn(8, 64))
    print("\n".join(watch.card.lines()))

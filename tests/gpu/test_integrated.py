"""The drop-in for pipelines on CUDA graphs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pytest_cudagraph import create_integrated_compiler


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval().cuda()


def eager(model, x):
    with torch.inference_mode():
        return model(x)


by_triton = pytest.mark.needs_triton("Inductor compiles for CUDA with Triton")


@pytest.mark.parametrize(
    "mode", ["none", pytest.param("default", marks=by_triton), pytest.param("aot", marks=by_triton)]
)
def test_graphs_serve_what_eager_gives(model, mode, tmp_path):
    with create_integrated_compiler(batch_sizes=(1, 4), cache_dir=tmp_path) as compiler:
        served = compiler.compile_model_aot(model, (torch.randn(2, 16, device="cuda"),), {"a": 1}, mode)
        for rows, path in ((1, "graph"), (3, "graph"), (4, "graph"), (5, "eager")):
            x = torch.randn(rows, 16, device="cuda")
            result = served.infer(x)
            assert result.path == path, served.statistics().notes
            torch.testing.assert_close(result.output, eager(model, x))
        assert served.statistics().device == "cuda:0"
        assert served.statistics().compiled_sizes == (() if mode == "none" else (1, 4))


def test_a_refused_capture_runs_eager_and_the_device_goes_on():
    class Reading(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    x = torch.ones(2, 3, device="cuda")
    with create_integrated_compiler(batch_sizes=(2,)) as compiler:
        refused = compiler.compile_model_aot(Reading(), (x,), None, "none")
        fine = compiler.compile_model_aot(torch.sin, (x,), None, "none")
        assert (refused.infer(x).path, fine.infer(x).path) == ("eager", "graph")
        assert torch.equal(refused(x), x * 6)
        assert torch.equal(fine(x), x.sin())


def test_changed_weights_are_served(model):
    x = torch.randn(2, 16, device="cuda")
    with create_integrated_compiler(batch_sizes=(2,)) as compiler:
        served = compiler.compile_model_aot(model, (x,), None, "none")
        with torch.no_grad():
            model[0].weight.mul_(2)
        torch.testing.assert_close(served(x), eager(model, x))
        model[2].weight = nn.Parameter(torch.randn_like(model[2].weight))
        result = served.infer(x)
        assert result.path == "graph"
        torch.testing.assert_close(result.output, eager(model, x))


def test_a_dead_model_gives_its_memory_back():
    compiler, x = create_integrated_compiler(batch_sizes=(2,)), torch.randn(2, 1024, device="cuda")
    with compiler:
        kept = compiler.compile_model_aot(nn.Linear(1024, 8).eval().cuda(), (x,), None, "none")
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = nn.Linear(1024, 4096).eval().cuda()
        compiler.compile_model_aot(model, (x,), None, "none")
        del model
        gc.collect()
        compiler.statistics()
        gc.collect()
        assert torch.cuda.memory_allocated() < before + 8 * 2**20  # the weights alone are 16 MiB
        assert kept.infer(x).path == "graph"

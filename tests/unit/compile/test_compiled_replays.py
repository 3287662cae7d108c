"""Compiled for real, captured by the twin: what a C++ compiler made is what replays."""

from __future__ import annotations

import pytest
import torch

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.inputs import Example, fresh

pytestmark = pytest.mark.slow

SIZES = (2, 3)


class Net(torch.nn.Module):
    """A graph on either side of a break; plain values and nesting in and out."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, scale, *, mask=None):
        hidden = torch.relu(self.linear(x)) * scale
        torch._dynamo.graph_break()  # export takes no notice of it
        return {"y": torch.tanh(hidden + x) * mask, "none": None, "scale": scale}


@pytest.fixture(autouse=True, scope="module")
def _no_pool_of_workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def inputs():
    return {size: Example(args=(torch.randn(size, 8), 2.0), kwargs={"mask": torch.ones(size, 8)}) for size in SIZES}


def replays_equal_compiled(compiled, size, example):
    """Capture one batch size on the twin; replay on fresh inputs; how often the regions ran per replay."""
    backend = open_backend("cpu")
    call = compiled.call_for(size)
    with backend.running(), backend.pool() as pool:
        graph = pool.capture(call, example.args, example.kwargs, batch_size=size)
        other = fresh(example, 1)
        expected = call(*other.args, **other.kwargs)
        before = compiled.executions(size)
        found = graph(*other.args, **other.kwargs)
        ran = compiled.executions(size) - before
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return graph.receipt.opaque_regions, ran


def test_inductor_code_is_what_replays(net, inputs, tmp_path):
    with compile_model(net, inputs, "inductor", open_backend("cpu"), cache_dir=tmp_path) as compiled:
        for size, example in inputs.items():
            with torch.inference_mode():
                found = compiled.call_for(size)(*example.args, **example.kwargs)
                torch.testing.assert_close(found, net(*example.args, **example.kwargs))
            assert replays_equal_compiled(compiled, size, example) == (2, 2)


def test_a_package_is_what_replays_and_is_built_once(net, inputs, tmp_path):
    one = {2: inputs[2]}
    built = compile_model(net, one, "aot", open_backend("cpu"), cache_dir=tmp_path)
    cached = compile_model(net, one, "aot", open_backend("cpu"), cache_dir=tmp_path)
    assert "batch 2: package from cache" not in built.notes
    assert "batch 2: package from cache" in cached.notes
    for compiled in (built, cached):
        with torch.inference_mode():
            found = compiled.call_for(2)(*inputs[2].args, **inputs[2].kwargs)
            torch.testing.assert_close(found, net(*inputs[2].args, **inputs[2].kwargs))
        assert replays_equal_compiled(compiled, 2, inputs[2]) == (1, 1)

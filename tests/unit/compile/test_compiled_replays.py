"""Compiled for real, captured by the twin: what a C++ compiler made is what replays."""

from __future__ import annotations

import pytest
import torch
from tests.checked import checked

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.inputs import Example, fresh
from pytest_cudagraph.values import Agreement

pytestmark = pytest.mark.slow


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
    return {2: Example(args=(torch.randn(2, 8), 2.0), kwargs={"mask": torch.ones(2, 8)})}


def answers_as_eager(compiled, net, inputs):
    with torch.inference_mode():
        found = compiled.call_for(2)(*inputs[2].args, **inputs[2].kwargs)
        torch.testing.assert_close(found, net(*inputs[2].args, **inputs[2].kwargs))


def replays_equal_compiled(compiled, example):
    """Capture on the twin, and replay on fresh inputs. Gives the regions, and how often they ran per replay."""
    backend, call = open_backend("cpu"), compiled.call_for(2)
    with backend.running(), backend.pool() as pool:
        graph = pool.capture(call, example.args, example.kwargs, batch_size=2)
        other = fresh(example, 1)
        expected = call(*other.args, **other.kwargs)
        before = compiled.executions(2)
        found = graph(*other.args, **other.kwargs)
        ran = compiled.executions(2) - before
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return graph.receipt.opaque_regions, ran


def test_inductor_code_is_what_replays(net, inputs, tmp_path):
    with compile_model(net, inputs, "inductor", open_backend("cpu"), cache_dir=tmp_path) as compiled:
        answers_as_eager(compiled, net, inputs)
        assert replays_equal_compiled(compiled, inputs[2]) == (2, 2)


def test_a_package_is_what_replays_and_is_built_once_and_noted_to_hold_its_own_weights(net, inputs, tmp_path):
    built = compile_model(net, inputs, "aot", open_backend("cpu"), cache_dir=tmp_path)
    cached = compile_model(net, inputs, "aot", open_backend("cpu"), cache_dir=tmp_path)
    assert "batch 2: package from cache" not in built.notes
    assert "batch 2: package from cache" in cached.notes
    for compiled in (built, cached):
        answers_as_eager(compiled, net, inputs)
        assert replays_equal_compiled(compiled, inputs[2]) == (1, 1)
    found = checked(net, inputs, open_backend("cpu"), call_for=cached.call_for, seed=3)[2]
    assert isinstance(found, Agreement)
    assert [note.partition(" (")[0] for note in found.notes] == ["the compiled code holds weights of its own"]

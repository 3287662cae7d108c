"""One preparation of a model at one size: what it gives agrees with eager, and the model stays as it was."""

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.compile.compile_batches import CompiledBatch
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.stages import Stages, prepare


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.weight + self.calls


class WrongInACapture(nn.Module):
    def forward(self, x):
        return x * 1.5 if is_capturing() else x


def stages_of(model, *sizes):
    examples = {size: Example(args=(torch.randn(size, 3),), kwargs={}) for size in sizes}
    return Stages(model=model, examples=examples, backend=open_backend("cpu"))


def code_of(call, *sizes):
    return Compiled("inductor", {size: CompiledBatch(call=call, regions=None, compile_ns=0) for size in sizes})


def test_a_graph_of_one_of_the_sizes_is_prepared_and_the_state_stays():
    model = Counts().eval()
    stages = stages_of(model, 1, 2)
    with stages.backend.pool() as pool:
        prepared = prepare(stages, 2, None, pool)
        assert prepared.call is prepared.graph
        assert prepared.graph.receipt.batch_size == 2
        assert list(prepared.captures.graphs) == [2]
        assert model.calls.item() == 0


def test_a_graph_that_differs_from_eager_is_refused_and_closed():
    stages = stages_of(WrongInACapture(), 2)
    with stages.backend.pool() as pool:
        captured = []
        capture = pool.capture
        pool.capture = lambda *args, **options: captured.append(capture(*args, **options)) or captured[-1]
        with pytest.raises(CaptureRefusal, match="differs from eager"):
            prepare(stages, 2, None, pool)
        with pytest.raises(Exception, match="closed"):
            captured[0].replay()


def test_compiled_code_that_differs_from_eager_is_refused_without_a_graph_too():
    model = Counts().eval()
    stages = stages_of(model, 1)
    assert prepare(stages, 1, code_of(model, 1), None).graph is None
    with pytest.raises(CaptureRefusal, match="differs from eager"):
        prepare(stages, 1, code_of(lambda x: x, 1), None)
    assert (model.calls.item(), model.weight.tolist()) == (0, [1.0, 1.0, 1.0])


def test_a_model_that_is_not_compiled_needs_no_check_without_a_graph():
    stages = stages_of(WrongInACapture(), 1)
    assert prepare(stages, 1, None, None).call is stages.model


def test_an_error_of_the_model_at_one_size_is_returned_and_its_state_restored():
    class Fails(Counts):
        def forward(self, x):
            super().forward(x)
            if len(x) > 1:
                raise ValueError("too long")

    model = Fails()
    stages = stages_of(model, 1, 2)
    assert stages.eager_error(1) is None
    assert str(stages.eager_error(2)) == "too long"
    assert model.calls.item() == 0

"""A small model, and a compile stage that costs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph.compile import Compiled
from pytest_cudagraph.compile.compile_batches import CompiledBatch
from pytest_cudagraph.pipeline import stages


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


class FakeCompiler:
    """In place of the compile stage: hands out ``make(model)`` for each batch size, or raises."""

    def __init__(self):
        self.make = lambda model: lambda *args, **kwargs: model(*args, **kwargs)
        self.error = None
        self.modes, self.folders, self.limits_s, self.made = [], [], [], []

    def __call__(self, model, examples, mode, backend, *, cache_dir, time_limit_s):
        self.modes.append(mode)
        self.folders.append(cache_dir)
        self.limits_s.append(time_limit_s)
        if self.error is not None:
            raise self.error
        made = {size: CompiledBatch(call=self.make(model), regions=None, compile_ns=1) for size in examples}
        self.made.append(Compiled(mode, made))
        return self.made[-1]


@pytest.fixture
def fake_compiler(monkeypatch):
    compiler = FakeCompiler()
    monkeypatch.setattr(stages, "compile_model", compiler)
    return compiler


@pytest.fixture
def eager():
    def call(model, *args, **kwargs):
        with torch.inference_mode():
            return model(*args, **kwargs)

    return call

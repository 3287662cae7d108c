"""A backend that only counts, and compilers that cost nothing."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

from pytest_cudagraph.inputs import Example


class CountingRegion:
    def __init__(self, call, label):
        self.call = call
        self.label = label
        self.executions = 0

    def __call__(self, *args, **kwargs):
        self.executions += 1
        return self.call(*args, **kwargs)


class CountingBackend:
    kind = "cpu"
    device = "cpu"

    def __init__(self):
        self.regions = []

    def running(self):
        return torch.inference_mode()

    def region(self, call, label):
        self.regions.append(CountingRegion(call, label))
        return self.regions[-1]


@pytest.fixture(autouse=True, scope="session")
def _loaded_compilers():
    """Loading them warns of their own deprecations; the stage loads them under a filter, these tests also by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


@pytest.fixture
def backend():
    return CountingBackend()


@pytest.fixture
def make_region():
    return CountingRegion


@pytest.fixture
def examples():
    """Inputs of a model on (batch, 4), for the batch sizes asked for."""

    def make(*sizes, **kwargs):
        generator = torch.Generator().manual_seed(0)
        return {size: Example(args=(torch.randn(size, 4, generator=generator),), kwargs=kwargs) for size in sizes}

    return make


@pytest.fixture
def interpreted(monkeypatch):
    """Inductor without its compiler: the graphs TorchDynamo finds run as they are."""
    from torch._inductor import compile_fx

    def interpret(graph, inputs, **options):
        return lambda arguments: graph(*arguments)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", interpret)

"""The CPU twin refuses what CUDA refuses, with CUDA's words and the user's line, and leaves everything usable."""

from __future__ import annotations

import ctypes
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cudagraph import hazards
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import CaptureRefusal

SYNC = hazards.CAPTURE_UNSUPPORTED.text
GENERATOR = torch.Generator()


def branch(x):
    return x + 1 if x.sum() > 0 else x


def reads_mask(x):
    return x[x > 0]


def reseeds(x):
    torch.manual_seed(0)
    return x + torch.rand(2)


REFUSED = {
    "item": (lambda x: x * x.sum().item(), "host-sync", SYNC),
    "float": (lambda x: x * float(x[0]), "host-sync", SYNC),
    "branch": (branch, "host-sync", SYNC),
    "tolist": (lambda x: x * x.tolist()[0], "host-sync", SYNC),
    "numpy": (lambda x: x * float(x.numpy()[0]), "host-sync", SYNC),
    "asarray": (lambda x: x * float(np.asarray(x)[0]), "host-sync", SYNC),
    "cpu": (lambda x: x.cpu() * 2, "host-sync", SYNC),
    "to cpu": (lambda x: x.to("cpu") * 2, "host-sync", SYNC),
    "to device cpu": (lambda x: x.to(device="cpu:0") * 2, "host-sync", SYNC),
    "repr": (lambda x: (x * 2, repr(x))[0], "host-sync", SYNC),
    "format": (lambda x: (x * 2, f"{x.sum():.2f}")[0], "host-sync", SYNC),
    "pin": (lambda x: x.pin_memory() * 2, "host-sync", SYNC),
    "synchronize": (lambda x: (x * 2, torch.cuda.synchronize())[0], "host-sync", SYNC),
    "allclose": (lambda x: x * torch.allclose(x, x), "host-sync", SYNC),
    "nonzero": (lambda x: x.nonzero(), "dynamic-shape", SYNC),
    "mask": (reads_mask, "dynamic-shape", SYNC),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.long) * 2),
        "dynamic-shape",
        SYNC,
    ),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0], device=x.device), "host-data", hazards.UNPINNED_COPY_TEXT),
    "generator": (
        lambda x: x + torch.rand(2, generator=GENERATOR, device=x.device),
        "rng",
        hazards.FOREIGN_GENERATOR_TEXT,
    ),
    "reseed": (reseeds, "rng", hazards.RNG_STATE_TEXT),
    "rng state": (lambda x: (x * 2, torch.get_rng_state())[0], "rng", hazards.RNG_STATE_TEXT),
    "sparse": (lambda x: x.to_sparse(), "dynamic-shape", SYNC),
}


def only_recorded(model):
    """A model whose hazard shows in the recorded call alone, the fourth after three warm-ups."""
    calls = []

    def call(x):
        calls.append(x)
        return model(x) if len(calls) % 4 == 0 else x * 2

    return call


def refused(model, given=None):
    """The refusal of a capture of ``model``."""
    with CpuBackend().pool() as pool, pytest.raises(CaptureRefusal) as caught:
        pool.capture(model, (torch.ones(2) if given is None else given,), {}, batch_size=2)
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused_in_its_words(name):
    model, hazard, text = REFUSED[name]
    caught = refused(only_recorded(model))
    assert (caught.hazard, caught.text) == (hazard, text)
    assert hazard in hazards.CATALOGUE
    assert caught.operation
    assert caught.site is not None
    assert caught.site.file == __file__


ALLOWED = {
    "address": lambda x: x * (x.data_ptr() % 2),
    "to device": lambda x: x.to(x.device) * 2,
    "to dtype": lambda x: x.to(torch.float64) * 2,
    "number": lambda x: x * torch.tensor(2.0),
    "masked write": lambda x: x.masked_fill(x > 0, 1.0),
    "one hot": lambda x: nn.functional.one_hot(torch.zeros(2, dtype=torch.long), 3),
    "default generator": lambda x: x + torch.rand(2, generator=torch.default_generator, device=x.device),
    "sizes": lambda x: x.view(x.shape[0], -1) * x.numel(),
    "output size": lambda x: x.repeat_interleave(torch.full((2,), 2, device=x.device), output_size=4),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_takes_is_taken(name):
    with CpuBackend().pool() as pool:
        pool.capture(ALLOWED[name], (torch.ones(2),), {}, batch_size=2).replay()


def test_the_site_is_the_line_of_the_refused_operation():
    caught = refused(branch)
    assert caught.site.line == branch.__code__.co_firstlineno + 1
    assert caught.site.function == "branch"


def test_a_swallowed_refusal_still_refuses_and_later_work_echoes_it():
    echoes = []

    def model(x):
        try:
            x.sum().item()
        except CaptureRefusal:
            pass
        try:
            return x * 2
        except CaptureRefusal as echo:
            echoes.append(echo.text)
            return torch.cuda  # anything

    caught = refused(only_recorded(model))
    assert caught.text == SYNC
    assert echoes == [hazards.CAPTURE_INVALIDATED.text]


def test_a_refusal_wrapped_by_the_model_is_raised_as_it_was():
    def model(x):
        try:
            return x.tolist()
        except CaptureRefusal as exc:
            raise RuntimeError("the model failed") from exc

    caught = refused(only_recorded(model))
    assert caught.operation == "Tensor.tolist"
    assert str(caught.__cause__) == "the model failed"


def test_an_error_of_the_model_is_raised_as_it_is():
    def model(x):
        raise ZeroDivisionError("mine")

    with CpuBackend().pool() as pool, pytest.raises(ZeroDivisionError, match="mine"):
        pool.capture(only_recorded(model), (torch.ones(2),), {}, batch_size=2)


def test_after_a_refusal_torch_model_and_pool_are_as_before():
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "to", "__repr__")}
    own = set(vars(torch.Tensor))
    functions = (torch.manual_seed, torch.get_rng_state, torch.cuda.synchronize, torch.cuda.is_current_stream_capturing)
    buffer = torch.zeros(2)

    def model(x):
        buffer.add_(1)
        torch.rand(2)
        return x * x.sum().item()

    with CpuBackend().pool() as pool:
        torch.manual_seed(3)
        with pytest.raises(CaptureRefusal):
            pool.capture(only_recorded(model), (torch.ones(2),), {}, batch_size=2)
        assert buffer.tolist() == [0, 0]
        drawn = torch.rand(2)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(2))
        assert {name: getattr(torch.Tensor, name) for name in before} == before
        assert set(vars(torch.Tensor)) == own
        now = (torch.manual_seed, torch.get_rng_state, torch.cuda.synchronize, torch.cuda.is_current_stream_capturing)
        assert now == functions
        graph = pool.capture(lambda x: x * 2, (torch.ones(2),), {}, batch_size=2)
        assert graph.replay().tolist() == [2, 2]


def test_another_thread_is_not_refused():
    read = []

    def model(x):
        thread = threading.Thread(target=lambda: read.append((torch.ones(2).tolist(), repr(torch.ones(1)))))
        thread.start()
        thread.join()
        return x * 2

    with CpuBackend().pool() as pool:
        pool.capture(model, (torch.ones(2),), {}, batch_size=2)
    assert read == [([1.0, 1.0], "tensor([1.])")] * 4


def test_a_layout_without_an_address_is_refused():
    dense = torch.eye(2).to_sparse()

    caught = refused(lambda x: (dense * 2).to_dense() + x, torch.ones(2, 2))
    assert caught.hazard == "unknown-op"
    assert caught.text == "the CPU twin cannot keep a result of layout sparse_coo at a fixed address"


def test_a_hidden_write_is_refused_also_where_the_model_takes_only_positive_numbers(twin, recwarn):
    def model(x):
        if not (np.from_dlpack(x) > 0).all():
            warnings.warn("not positive", stacklevel=1)
            raise ValueError
        y = x * 1
        ctypes.memset(np.from_dlpack(y).ctypes.data, 0, y.element_size())
        return y + 1

    with pytest.raises(CaptureRefusal, match=r"^a tensor of \(2,\) changed, and no torch operation wrote it") as caught:
        twin.capture(model, (torch.ones(2),), {}, batch_size=2)
    assert (caught.value.hazard, caught.value.site.line) == ("hidden-write", model.__code__.co_firstlineno + 6)
    assert not recwarn.list

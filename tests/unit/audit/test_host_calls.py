"""The watch sees the Python calls that the dispatcher does not show, during one call of the model."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.audit.trace import Trace
from pytest_cudagraph.backends.capture_mode import claims_capture, replaced
from pytest_cudagraph.backends.placement import Placement

X = torch.ones(2, 2)


def watch_of(*, on_gpu=False):
    return HostCallWatch(placement=None if on_gpu else Placement(()), trace=Trace())


def seen(call, *, on_gpu=False):
    watch = watch_of(on_gpu=on_gpu)
    with watch.watching():
        call()
    return [(found.id, found.operation, found.level) for _, found in watch.trace.host_calls]


def seen_on_gpu(call):
    def run():
        # Fake tensors have no values, so many calls raise. Only what the watch saw before that counts.
        with contextlib.suppress(Exception):
            call()

    return seen(run, on_gpu=True)


HOST_CALLS = {
    "tolist": (lambda: X.tolist(), ("host-sync", "Tensor.tolist", "error")),
    "numpy": (lambda: X.numpy(), ("host-sync", "Tensor.numpy", "error")),
    "asarray": (lambda: np.asarray(X), ("host-sync", "Tensor.__array__", "error")),
    "cpu": (lambda: X.cpu(), ("host-sync", "Tensor.cpu", "error")),
    "to cpu": (lambda: X.to("cpu"), ("host-sync", "Tensor.to", "error")),
    "to device cpu": (lambda: X.to(device="cpu:0"), ("host-sync", "Tensor.to", "error")),
    "repr": (lambda: repr(X), ("host-sync", "Tensor.__repr__", "error")),
    "str": (lambda: str(X), ("host-sync", "Tensor.__repr__", "error")),
    "format": (lambda: f"{X}", ("host-sync", "Tensor.__format__", "error")),
    "address": (lambda: X.data_ptr(), ("unknown-op", "Tensor.data_ptr", "note")),
    "new_tensor": (lambda: X.new_tensor([1.0]), ("host-data", "Tensor.new_tensor", "error")),
    "reseeding": (lambda: torch.manual_seed(0), ("rng", "torch.manual_seed", "error")),
    "random state": (lambda: torch.random.get_rng_state(), ("rng", "torch.random.get_rng_state", "error")),
}

LEGAL = {
    "to the device of a tensor": lambda: X.to(X.device),
    "to a dtype": lambda: X.to(torch.float64),
    "a number of the host": lambda: torch.tensor(1.0),
    "an empty tensor on a device": lambda: torch.tensor([], device=X.device),
    "a tensor taken over": lambda: torch.as_tensor(X, device=X.device),
    "a new buffer name": lambda: setattr(nn.Linear(1, 1), "note", "text"),
    "addresses compared by torch": lambda: nn.LSTM(2, 2).flatten_parameters(),
}


@pytest.mark.parametrize("name", HOST_CALLS)
def test_a_call_is_seen_once(name):
    call, expected = HOST_CALLS[name]
    with torch.random.fork_rng():
        assert seen(call) == [expected]


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_call_is_not_seen(name):
    assert seen(LEGAL[name]) == []


def test_a_finding_points_at_the_line():
    watch = watch_of()
    with watch.watching():
        X.tolist()
    ((_, found),) = watch.trace.host_calls
    assert (found.site.file, found.site.function) == (__file__, "test_a_finding_points_at_the_line")


def test_new_data_for_a_tensor_is_seen_and_done():
    weight = torch.zeros(2)
    assert seen(lambda: setattr(weight, "data", torch.ones(2))) == [("rebinds-state", "Tensor.data", "error")]
    assert torch.equal(weight, torch.ones(2))


def test_another_parameter_or_buffer_under_the_same_name_is_seen_and_done():
    module = nn.BatchNorm1d(2)
    expected = [("rebinds-state", "assignment", "error")]
    assert seen(lambda: setattr(module, "running_mean", torch.ones(2))) == expected
    assert seen(lambda: setattr(module, "weight", nn.Parameter(torch.ones(2)))) == expected
    assert torch.equal(module.running_mean, torch.ones(2))


def test_an_assignment_of_the_same_tensor_is_none():
    module = nn.BatchNorm1d(2)
    assert seen(lambda: setattr(module, "running_mean", module.running_mean)) == []


def test_on_a_gpu_reads_of_host_tensors_are_not_seen():
    assert seen(lambda: (X.tolist(), X.numpy(), repr(X), X.cpu(), X.to("cpu")), on_gpu=True) == []


def test_calls_of_other_threads_are_not_seen():
    def elsewhere():
        thread = threading.Thread(target=X.tolist)
        thread.start()
        thread.join()

    assert seen(elsewhere) == []


def test_everything_is_put_back_after_an_exception():
    before = dict(vars(torch.Tensor)), torch.tensor, nn.Module.__setattr__
    with pytest.raises(ValueError, match="stop"), watch_of().watching():
        raise ValueError("stop")
    assert (dict(vars(torch.Tensor)), torch.tensor, nn.Module.__setattr__) == before


def test_libraries_that_ask_hear_that_a_stream_is_capturing():
    original = torch.cuda.is_current_stream_capturing
    with replaced(claims_capture()):
        assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.graphs.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is original


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: x.to("cpu"), "Tensor.to"),
        (lambda x: x.to(device=torch.device("cpu")), "Tensor.to"),
        (lambda x: x.sum().item(), "Tensor.item"),
        (lambda x: bool(x.sum()), "Tensor.__bool__"),
    ],
)
def test_a_read_of_a_tensor_on_the_gpu_waits_for_it(on_gpu, read, operation):
    assert seen_on_gpu(lambda: read(on_gpu(3)))[:1] == [("host-sync", operation, "error")]


def test_a_move_to_the_host_is_meant_on_a_gpu_also_where_a_variable_says_so(on_gpu):
    there = torch.device("cpu")
    assert seen_on_gpu(lambda: on_gpu(3).to(there))[:1] == [("host-sync", "Tensor.to", "error")]
    assert seen_on_gpu(lambda: X.to(there)) == []


def test_a_move_within_the_gpu_waits_for_nothing(on_gpu):
    assert seen_on_gpu(lambda: on_gpu(3).to(torch.float16)) == []
    assert seen_on_gpu(lambda: on_gpu(3).to("cuda:0")) == []


def test_new_data_for_a_tensor_on_the_gpu_is_copied_there_and_for_one_on_the_host_is_not(on_gpu):
    assert seen_on_gpu(lambda: on_gpu(3).new_tensor([1.0, 2.0]))[:1] == [("host-data", "Tensor.new_tensor", "error")]
    assert seen_on_gpu(lambda: X.new_tensor([1.0, 2.0])) == []


def test_a_number_made_on_the_gpu_is_copied_there(on_gpu):
    device = on_gpu(1).device
    assert seen_on_gpu(lambda: torch.tensor(2.0, device=device))[:1] == [("host-data", "torch.tensor", "error")]
    assert seen_on_gpu(lambda: torch.as_tensor([1.0], device=device))[:1] == [("host-data", "torch.as_tensor", "error")]
    assert seen_on_gpu(lambda: torch.tensor(2.0, device=torch.device("cpu"))) == []


def test_a_branch_on_is_cuda_is_taken_as_it_is_there(on_gpu):
    watch = watch_of(on_gpu=True)
    x = on_gpu(1)
    with watch.watching():
        taken = "gpu" if x.is_cuda else "host"
        other = "gpu" if X.is_cuda else "host"
    assert (taken, other, watch.gpu_branches) == ("gpu", "host", [])

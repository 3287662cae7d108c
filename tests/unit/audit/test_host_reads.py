"""What the dispatcher cannot see is seen by torch's own methods, for as long as one pass runs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.backends.refused_calls import claims_capture, replaced

X = torch.ones(2, 2)


def sighted(call, *, on_gpu=False):
    reads = HostCallWatch(on_gpu=on_gpu)
    with reads.watching():
        call()
    return [(sighting.id, sighting.operation, sighting.level) for sighting in reads.found]


SEEN = {
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
    "tensor on a device": (lambda: torch.tensor(1.0, device=X.device), ("host-data", "torch.tensor", "error")),
    "reseeding": (lambda: torch.manual_seed(0), ("rng", "torch.manual_seed", "error")),
    "random state": (lambda: torch.random.get_rng_state(), ("rng", "torch.random.get_rng_state", "error")),
}

UNSEEN = {
    "to the device of a tensor": lambda: X.to(X.device),
    "to a dtype": lambda: X.to(torch.float64),
    "a number of the host": lambda: torch.tensor(1.0),
    "an empty tensor on a device": lambda: torch.tensor([], device=X.device),
    "a tensor taken over": lambda: torch.as_tensor(X, device=X.device),
    "a new buffer name": lambda: setattr(nn.Linear(1, 1), "note", "text"),
    "addresses compared by torch": lambda: nn.LSTM(2, 2).flatten_parameters(),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_call_is_seen_once(name):
    call, expected = SEEN[name]
    with torch.random.fork_rng():
        assert sighted(call) == [expected]


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_no_read_of_the_host_is_passed_over(name):
    assert sighted(UNSEEN[name]) == []


def test_a_sighting_points_at_the_line():
    reads = HostCallWatch(on_gpu=False)
    with reads.watching():
        X.tolist()
    (sighting,) = reads.found
    assert sighting.site.file == __file__
    assert sighting.site.function == "test_a_sighting_points_at_the_line"


def test_new_data_for_a_tensor_is_seen_and_done():
    weight = torch.zeros(2)
    assert sighted(lambda: setattr(weight, "data", torch.ones(2))) == [("rebinds-state", "Tensor.data", "error")]
    assert torch.equal(weight, torch.ones(2))


def test_another_parameter_or_buffer_under_the_same_name_is_seen_and_done():
    module = nn.BatchNorm1d(2)
    expected = [("rebinds-state", "assignment", "error")]
    assert sighted(lambda: setattr(module, "running_mean", torch.ones(2))) == expected
    assert sighted(lambda: setattr(module, "weight", nn.Parameter(torch.ones(2)))) == expected
    assert torch.equal(module.running_mean, torch.ones(2))


def test_an_assignment_of_the_same_tensor_is_none():
    module = nn.BatchNorm1d(2)
    assert sighted(lambda: setattr(module, "running_mean", module.running_mean)) == []


def test_on_a_gpu_reads_of_host_tensors_are_passed_over():
    assert sighted(lambda: (X.tolist(), X.numpy(), repr(X), X.cpu(), X.to("cpu")), on_gpu=True) == []
    assert sighted(lambda: torch.tensor(1.0, device=torch.device("cpu")), on_gpu=True) == []


def test_other_threads_are_not_the_models():
    def elsewhere():
        thread = threading.Thread(target=X.tolist)
        thread.start()
        thread.join()

    assert sighted(elsewhere) == []


def test_everything_is_put_back_after_an_exception():
    before = dict(vars(torch.Tensor)), torch.tensor, nn.Module.__setattr__
    with pytest.raises(ValueError, match="stop"), HostCallWatch(on_gpu=False).watching():
        raise ValueError("stop")
    assert (dict(vars(torch.Tensor)), torch.tensor, nn.Module.__setattr__) == before


def test_libraries_that_ask_are_told_that_a_stream_is_capturing():
    original = torch.cuda.is_current_stream_capturing
    with replaced(claims_capture()):
        assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.graphs.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is original

"""What is said of tensors on a GPU, which here only say that they lie on one: torch's fake tensors need no driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_cudagraph.audit.host_calls import HostCallWatch
from pytest_cudagraph.audit.rule_checks import Operators, RuleChecker

aten = torch.ops.aten
HOST = torch.ones(3)


@pytest.fixture
def on_gpu():
    """Make a tensor that says it lies on a GPU."""

    def make(*shape, dtype=torch.float32):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.empty(shape, dtype=dtype, device="cuda:0")

    return make


def sighted(call):
    reads = HostCallWatch(on_gpu=True)
    with reads.watching():
        try:
            call()
        # What is asked of a tensor without values fails; what was seen before that is what counts.
        except Exception:
            return [(sighting.id, sighting.operation) for sighting in reads.found]
    return [(sighting.id, sighting.operation) for sighting in reads.found]


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
    assert sighted(lambda: read(on_gpu(3)))[:1] == [("host-sync", operation)]


def test_a_move_to_the_host_is_meant_on_a_gpu_also_where_a_variable_says_so(on_gpu):
    there = torch.device("cpu")
    assert sighted(lambda: on_gpu(3).to(there))[:1] == [("host-sync", "Tensor.to")]
    assert sighted(lambda: HOST.to(there)) == []


def test_a_move_within_the_gpu_waits_for_nothing(on_gpu):
    assert sighted(lambda: on_gpu(3).to(torch.float16)) == []
    assert sighted(lambda: on_gpu(3).to("cuda:0")) == []


def test_new_data_for_a_tensor_on_the_gpu_is_copied_there_and_for_one_on_the_host_is_not(on_gpu):
    assert sighted(lambda: on_gpu(3).new_tensor([1.0, 2.0]))[:1] == [("host-data", "Tensor.new_tensor")]
    assert sighted(lambda: HOST.new_tensor([1.0, 2.0])) == []


def test_a_number_made_on_the_gpu_is_copied_there(on_gpu):
    device = on_gpu(1).device
    assert sighted(lambda: torch.tensor(2.0, device=device))[:1] == [("host-data", "torch.tensor")]
    assert sighted(lambda: torch.as_tensor([1.0], device=device))[:1] == [("host-data", "torch.as_tensor")]
    assert sighted(lambda: torch.tensor(2.0, device=torch.device("cpu"))) == []


def test_a_branch_on_is_cuda_is_taken_as_it_is_there(on_gpu):
    reads = HostCallWatch(on_gpu=True)
    x = on_gpu(1)
    with reads.watching():
        taken = "gpu" if x.is_cuda else "host"
        other = "gpu" if HOST.is_cuda else "host"
    assert (taken, other, reads.gpu_branches) == ("gpu", "host", [])


def judged(func, *args, kind="cuda"):
    found = RuleChecker(SimpleNamespace(kind=kind), ()).judge(Operators().of(func), args, {})
    assert found is None or found.site is None
    return found and found.id


def test_an_operation_whose_size_lies_on_the_gpu_is_refused_and_one_on_host_tensors_alone_is_not(on_gpu):
    assert judged(aten.nonzero.default, on_gpu(3)) == "dynamic-shape"
    assert judged(aten.nonzero.default, HOST) is None
    assert judged(aten.nonzero.default, HOST, kind="cpu") == "dynamic-shape"


def test_a_mixture_of_host_and_gpu_is_no_business_of_the_host_alone(on_gpu):
    mask = torch.ones(3, dtype=torch.bool)
    assert judged(aten.masked_select.default, on_gpu(3), mask) == "dynamic-shape"


def test_an_operator_that_nobody_can_look_into_is_worth_a_note_whatever_it_takes():
    @torch.library.custom_op("audit_on_a_gpu::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert judged(torch.ops.audit_on_a_gpu.twice.default, HOST) == "unknown-op"


def test_data_made_on_the_host_stays_there_without_a_word_and_is_refused_on_its_way_to_the_gpu(on_gpu):
    assert judged(aten.lift_fresh.default, HOST) is None
    assert judged(aten.lift_fresh.default, on_gpu(3)) == "host-data"
    assert judged(aten.copy_.default, on_gpu(3), HOST) == "host-data"
    assert judged(aten.copy_.default, HOST, on_gpu(3)) == "host-sync"

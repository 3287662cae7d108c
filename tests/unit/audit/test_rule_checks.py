"""The rules on a GPU and on a CPU. Fake tensors of torch claim to lie on a GPU and need no driver."""

from __future__ import annotations

import torch

from pytest_cudagraph.audit.rule_checks import Operators, RuleChecker
from pytest_cudagraph.backends.placement import Placement

aten = torch.ops.aten
HOST = torch.ones(3)


def judged(func, *args, kind="cuda"):
    found = RuleChecker(None if kind == "cuda" else Placement(())).judge(Operators().of(func), args, {})
    assert found is None or found.site is None
    return found and found.id


def test_an_operation_whose_size_lies_on_the_gpu_is_refused_and_one_on_host_tensors_alone_is_not(on_gpu):
    assert judged(aten.nonzero.default, on_gpu(3)) == "dynamic-shape"
    assert judged(aten.nonzero.default, HOST) is None
    assert judged(aten.nonzero.default, HOST, kind="cpu") == "dynamic-shape"


def test_an_operation_on_host_and_gpu_tensors_together_is_refused(on_gpu):
    mask = torch.ones(3, dtype=torch.bool)
    assert judged(aten.masked_select.default, on_gpu(3), mask) == "dynamic-shape"


def test_a_custom_operator_is_a_note_for_all_arguments():
    @torch.library.custom_op("audit_on_a_gpu::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert judged(torch.ops.audit_on_a_gpu.twice.default, HOST) == "unknown-op"


def test_data_of_the_host_is_legal_there_and_refused_on_its_way_to_the_gpu(on_gpu):
    assert judged(aten.lift_fresh.default, HOST) is None
    assert judged(aten.lift_fresh.default, on_gpu(3)) == "host-data"
    assert judged(aten.copy_.default, on_gpu(3), HOST) == "host-data"
    assert judged(aten.copy_.default, HOST, on_gpu(3)) == "host-sync"

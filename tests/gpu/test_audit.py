"""The audit on CUDA models: the same hazards at the same lines as on the twin."""

from __future__ import annotations

import pytest
import torch
from tests.gpu import small_models
from tests.gpu.small_models import Mlp, ReadsTheHost

from pytest_cudagraph.audit import audit
from pytest_cudagraph.errors import EagerFailed
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.prepared_model import PreparedModel, run_eagerly


def audited(backend, model, *args):
    return audit(model, Example(args=args, kwargs={}), backend)


def test_a_host_read_is_found_at_the_users_line(backend):
    found = audited(backend, ReadsTheHost(), torch.randn(4, 64, device=backend.device)).errors
    assert [finding.id for finding in found] == ["host-sync"], found
    assert found[0].site.file == small_models.__file__
    assert found[0].site.line == ReadsTheHost.forward.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("model", "hazard"),
    [
        (lambda x: x[x > 0].sum() + x, "dynamic-shape"),
        (lambda x: x + torch.tensor([1.0, 2.0], device=x.device), "host-data"),
        (lambda x: x if x.sum() > 0 else -x, "host-sync"),
        (lambda x: x.cpu().to(x.device) + 1, "host-sync"),
    ],
)
def test_what_cuda_refuses_is_an_error_of_the_audit(backend, model, hazard):
    found = audited(backend, model, torch.randn(4, 2, device=backend.device)).errors
    assert hazard in [finding.id for finding in found], found


def test_a_clean_model_has_no_error_and_is_left_alone(backend):
    model, x = Mlp().cuda().eval(), torch.randn(4, 64, device=backend.device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.cuda.get_rng_state().clone()
    found = audited(backend, model, x)
    assert found.errors == ()
    assert found.not_judged == ()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), drawn)


def test_a_plain_tensor_that_a_moved_copy_left_on_the_host_is_explained(backend):
    model = Mlp().cuda().eval()
    model.scale = torch.ones(64)
    model.register_forward_pre_hook(lambda module, args: (args[0] * module.scale,))
    examples = {4: Example(args=(torch.randn(4, 64, device=backend.device),), kwargs={})}
    with pytest.raises(EagerFailed, match=r"moved with Module\.to"):
        run_eagerly(PreparedModel(eager=model, examples=examples, is_copy=True), backend)

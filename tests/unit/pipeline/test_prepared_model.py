"""What a model's own error says about what the plugin did with the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import EagerFailed
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.pipeline.prepared_model import PreparedModel, run_eagerly

MOVED = "Module.to"


class OnTwoDevices(nn.Module):
    def forward(self, x):
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


def said(model, *, is_copy):
    examples = {2: Example(args=(torch.ones(2, 4),), kwargs={})}
    prepared = PreparedModel(eager=model, examples=examples, is_copy=is_copy)
    with pytest.raises(EagerFailed) as caught:
        run_eagerly(prepared, open_backend("cpu"))
    return str(caught.value)


def test_tensors_of_two_devices_are_explained_only_where_the_plugin_moved_the_model():
    text = said(OnTwoDevices(), is_copy=True)
    assert MOVED in text
    assert text.endswith("register such a tensor as a buffer, or make model and inputs on cudagraph.device")
    assert MOVED not in said(OnTwoDevices(), is_copy=False)

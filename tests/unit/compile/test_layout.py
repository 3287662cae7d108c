"""Nested arguments to flat tensors and back, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from pytest_cudagraph.compile.aot import ArgumentLayout, FlatModel, NestedCall
from pytest_cudagraph.errors import CudagraphError, InputError


def test_tensors_go_out_and_come_back_in_their_places():
    x, mask = torch.ones(2, 3), torch.zeros(2)
    value = (({"x": x}, 3), {"mask": mask, "flag": None})
    layout = ArgumentLayout.of(value)
    assert len(layout.tensors_of(value)) == 2
    (found, plain), kwargs = layout.fill(layout.tensors_of(value))
    assert found["x"] is x
    assert plain == 3
    assert kwargs["mask"] is mask
    assert kwargs["flag"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3, 3), 3), "args[0]: {} (2, 3) float32 on cpu, found (3, 3) float32 on cpu"),
        ((torch.ones(2, 3).double(), 3), "args[0]: {} (2, 3) float32 on cpu, found (2, 3) float64 on cpu"),
        ((1.5, 3), "args[0]: {} (2, 3) float32 on cpu, found 1.5"),
        ((torch.ones(2, 3), 4), "args[1]: {} 3, found 4"),
        ((torch.ones(2, 3), torch.ones(1)), "args[1]: {} 3, found (1,) float32 on cpu"),
    ],
)
def test_other_arguments_are_refused_by_name(args, message):
    with pytest.raises(InputError) as raised:
        ArgumentLayout.of(((torch.ones(2, 3), 3), {})).tensors_of((args, {}))
    assert str(raised.value) == message.format("the package is compiled for")


def test_arguments_nested_otherwise_are_refused():
    with pytest.raises(InputError) as raised:
        ArgumentLayout.of(((torch.ones(2, 3), 3), {})).tensors_of(((torch.ones(2, 3),), {}))
    assert str(raised.value) == (
        "the package takes arguments of the structure of the example inputs, found another one"
    )


def test_other_strides_are_put_right_since_a_package_does_not_look():
    layout = ArgumentLayout.of(((torch.ones(2, 3),), {}))
    strided = torch.arange(6.0).reshape(3, 2).t()
    (found,) = layout.tensors_of(((strided,), {}))
    assert found.stride() == (3, 1)
    torch.testing.assert_close(found, strided)


def test_the_order_of_keyword_arguments_does_not_matter(make_region):
    def model(*, a, b):
        return {"difference": a - b, "none": None}

    arguments = ((), {"a": torch.ones(2), "b": torch.zeros(2)})
    flat = FlatModel(model, ArgumentLayout.of(arguments))
    region = make_region(lambda *tensors: list(flat(*tensors)), "region")
    region(*flat.arguments.tensors_of(arguments))
    call = NestedCall(region, flat.arguments, flat.result.layout)
    assert call(b=torch.zeros(2), a=torch.ones(2))["difference"].tolist() == [1.0, 1.0]
    assert call(a=torch.ones(2), b=torch.zeros(2))["none"] is None


def test_a_result_is_unknown_until_the_model_was_called():
    with pytest.raises(CudagraphError, match="the model was not called while it was exported"):
        _ = FlatModel(abs, ArgumentLayout.of(((), {}))).result.layout

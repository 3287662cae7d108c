"""What can be asked for, what cannot, and what is the same request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import pytest
import torch
from torch import nn

from pytest_cudagraph import InputError, create_integrated_compiler
from pytest_cudagraph.serving.request import make_request


def request(config=None, mode="none", example=None, model=torch.sin, batch_dim=0):
    return make_request(model, (torch.ones(2, 3),) if example is None else example, config, mode, batch_dim)


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        ("none", "none"),
        ("eager", "none"),
        ("default", "inductor"),
        ("inductor", "inductor"),
        ("reduce-overhead", "inductor"),
        ("aot", "aot"),
        ("aot-inductor", "aot"),
    ],
)
def test_modes_of_pipelines_are_known(mode, compiled):
    assert request(mode=mode).compile_mode == compiled


@pytest.mark.parametrize("mode", ["max-autotune", "", None])
def test_an_unknown_mode_is_refused_with_those_there_are(mode):
    with pytest.raises(InputError) as caught:
        request(mode=mode)
    assert str(caught.value) == (
        f"compilation_mode is one of none, eager, default, inductor, reduce-overhead, aot, aot-inductor; found {mode!r}"
    )


def test_a_model_that_cannot_be_called_is_refused():
    with pytest.raises(InputError, match="the model must be callable; found dict"):
        request(model={})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_sizes": ()}, "batch sizes must be distinct positive ints, such as [1, 8], found none"),
        ({"device": "tpu"}, "device is one of auto, cuda, cpu; found 'tpu'"),
        ({"max_graphs": 0}, "max_graphs is a positive int, or None for one graph per batch size; found 0"),
        ({"compile_timeout_s": 0}, "compile_timeout_s is a positive number of seconds; found 0"),
        ({"compile_timeout_s": float("nan")}, "compile_timeout_s is a positive number of seconds; found nan"),
        ({"compile_timeout_s": "10"}, "compile_timeout_s is a positive number of seconds; found '10'"),
        ({"compile_timeout_s": True}, "compile_timeout_s is a positive number of seconds; found True"),
    ],
)
def test_options_that_cannot_be_are_refused(options, text):
    with pytest.raises(InputError) as caught:
        create_integrated_compiler(**options)
    assert str(caught.value) == text


class Settings:
    def __init__(self, name):
        self.model_name = name
        self.loader = object()


@dataclass
class Config:
    model_id: str = "by id"
    parts: list = field(default_factory=lambda: [1, {"a": None}])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("plain", "plain"),
        ({"model_id": "b", "model_name": "a"}, "a"),
        (Settings("attribute"), "attribute"),
        (Config(), "by id"),
        ({"model_name": 3}, "sin"),
        (None, "sin"),
    ],
)
def test_settings_name_the_model(config, name):
    assert request(config).name == name


def test_a_module_without_settings_is_named_by_its_class():
    assert request(model=nn.Identity()).name == "Identity"


class Colour(Enum):
    RED = 1


def test_plain_settings_count_and_addresses_do_not():
    assert request(Settings("a")).key == request(Settings("a")).key
    assert request(Settings("a")).key != request(Settings("b")).key
    assert request({"dtype": torch.float16, "c": Colour.RED}).settings == (
        '{"c": "Colour.RED", "dtype": "torch.float16"}'
    )
    assert request({"a": 1, "b": 2}).folder_name == request({"b": 2, "a": 1}).folder_name


def test_settings_that_lead_back_to_themselves_end():
    config = Settings("a")
    config.own = config
    nested = {"inner": config}
    nested["self"] = Settings("b")
    assert request(config).name == "a"
    assert request(nested).key == request(nested).key


def test_inputs_of_another_form_are_another_request():
    plain, cache = (torch.ones(2, 3), 1), object()
    assert request(example=plain).key == request(example=(torch.zeros(2, 3), 1)).key
    for other in ((torch.ones(2, 4), 1), (torch.ones(2, 3), 1.0), (torch.ones(2, 3).double(), 1), (torch.ones(2, 3),)):
        assert request(example=plain).key != request(example=other).key
    assert request(example=(torch.ones(2), cache)).key != request(example=(torch.ones(2), object())).key
    assert request(batch_dim=(0, None), example=plain).key != request(example=plain).key

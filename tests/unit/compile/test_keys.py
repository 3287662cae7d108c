"""Equal keys for equal packages only."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from pytest_cudagraph.compile import cache


class Affine(torch.nn.Module):
    def __init__(self, scale=2.0, width=4, name="weight"):
        super().__init__()
        self.scale = scale
        self.name = name
        self.register_parameter(name, torch.nn.Parameter(torch.arange(4.0 * width).reshape(4, width)))
        self.constant = torch.ones(width)

    def forward(self, x):
        return x @ getattr(self, self.name) * self.scale + self.constant


def key_of(model, x=None, *, options=None):
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (torch.zeros(2, 4) if x is None else x,), strict=False)
    return cache.content_key(program, device="cpu", options=options or {})


def changed(change):
    model = Affine()
    with torch.no_grad():
        change(model)
    return model


def test_the_key_is_the_same_for_the_same_content():
    assert key_of(Affine()) == key_of(Affine())


@pytest.mark.parametrize(
    "model",
    [
        Affine(scale=2.5),
        Affine(width=5),
        Affine(name="other"),
        Affine().double(),
        changed(lambda model: model.weight[0, 0].add_(1e-6)),
        changed(lambda model: model.constant.add_(1)),
        changed(lambda model: setattr(model, "weight", torch.nn.Parameter(model.weight.t().contiguous().t()))),
    ],
    ids=["scalar", "shape", "name", "dtype", "weight", "constant", "strides"],
)
def test_another_model_has_another_key(model):
    x = torch.zeros(2, 4, dtype=model.get_parameter(model.name).dtype)
    assert key_of(model, x) != key_of(Affine())


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.zeros(4, 2).t()], ids=["shape", "strides"])
def test_other_inputs_have_another_key(x):
    assert key_of(Affine(), x) != key_of(Affine())


def test_another_option_has_another_key_and_a_number_of_workers_has_not():
    assert key_of(Affine(), options={"freezing": True}) != key_of(Affine(), options={"freezing": False})
    assert key_of(Affine(), options={"compile_threads": 1}) == key_of(Affine(), options={"compile_threads": 2})


@pytest.mark.parametrize("part", ["torch.__version__", "threads"])
def test_another_machine_or_setting_has_another_key(part, monkeypatch):
    before = key_of(Affine())
    if part == "threads":
        threads = torch.get_num_threads() + 1
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    else:
        monkeypatch.setattr(torch, "__version__", "0.0")
    assert key_of(Affine()) != before


def test_a_weight_in_a_larger_storage_has_the_key_of_its_values():
    model = Affine()
    model.weight = torch.nn.Parameter(torch.arange(32.0).reshape(8, 4)[:4])
    assert key_of(model) == key_of(Affine())


def test_a_weight_that_is_more_than_its_bytes_has_no_key():
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sparse", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.sparse, x.t())

    assert key_of(Sparse()) is None


@pytest.mark.slow
def test_options_are_the_same_in_another_process():
    show = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pytest_cudagraph.compile.cache import options_text, compile_options\n"
        "print(options_text(compile_options()))"
    )
    other = subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True).stdout
    assert other.strip() == cache.options_text(cache.compile_options())
    assert "freezing=False" in other

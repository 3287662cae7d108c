"""How a model of a library is declared, and what makes every such library importable beside torch's CPU build."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_cudagraph import pytree

ROWS = 2
LENGTH = 8
WORDS = 50


class LibraryModel(NamedTuple):
    """A model at toy size with random weights, and what the product must say of it."""

    library: str
    """The module to import. Where it is not installed, the model is skipped."""
    make: Callable[[], tuple[nn.Module, tuple, dict]]
    """Makes the model, arguments and keywords on the CPU."""
    verdict: str = "clean"
    on_cuda: str = ""
    """The verdict on CUDA, where it knows where a tensor lies and the twin does not."""
    line: str = ""
    """A part of the source line at which the first error is."""
    batch_dim: Any = 0
    sizes: tuple[int, ...] = (2, 4)

    def verdict_on(self, kind):
        return self.on_cuda or self.verdict if kind == "cuda" else self.verdict

    def build(self):
        """As the plugin does it with a model on the CPU: made there, then moved to the default device."""
        device = torch.get_default_device()
        with torch.device("cpu"):
            model, args, kwargs = self.make()
            _fill_zeros(model)
        return model.eval().to(device), *pytree.map_tensors(lambda tensor: tensor.to(device), (args, kwargs))


LIBRARY_MODELS: dict[str, LibraryModel] = {}


def model_of(library, name="", **facts):
    """Declare the model that a function makes. ``facts`` are those of a :class:`LibraryModel`."""

    def declare(make):
        key = f"{library} {name or make.__name__}"
        assert key not in LIBRARY_MODELS, f"two models are called {key}"
        LIBRARY_MODELS[key] = LibraryModel(library, make, **facts)
        return make

    return declare


def _fill_zeros(model):
    """A last layer of zeros, as many libraries start with, would hide every difference."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.1)


def image(size=32, channels=3):
    return torch.randn(ROWS, channels, size, size)


def tokens(length=LENGTH):
    return torch.randint(2, WORDS, (ROWS, length))


def sequence(length=LENGTH, width=16):
    return torch.randn(ROWS, length, width)


def steps(count=1000):
    """A time step per row."""
    return torch.randint(0, count, (ROWS,))


_TORCHVISION_OPERATORS = ("nms", "qnms")
_KEPT = []
"""A library of operators lives as long as its object."""


def make_torchvision_importable():
    """Declare the operators that torchvision looks for while it is imported.

    PyPI has torchvision for torch's CUDA build only. Beside the CPU build its compiled part does not load, and the
    import fails. Its models need no such operator.
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")
        for name in _TORCHVISION_OPERATORS:
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(operators)

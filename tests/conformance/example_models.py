"""The models of ``examples/``, taken from there, with inputs as the examples give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

ROWS = 2
BATCH_SIZES = (1, 2, 4, 8)


class ExampleModel(NamedTuple):
    """What makes model, arguments and keywords, and the batch sizes that one such model serves."""

    build: Callable[[], tuple[Any, tuple, dict]]
    batch_sizes: tuple[int, ...] = BATCH_SIZES


def linear_classifier():
    from examples.test_linear_classifier import Classifier

    return Classifier().eval(), (torch.randn(ROWS, 64),), {}


def cnn():
    from examples.test_cnn import SmallCnn

    return SmallCnn().eval(), (torch.randn(ROWS, 3, 16, 16),), {}


def transformer(layers):
    from examples.test_transformer import make_encoder

    return make_encoder(layers), (torch.randn(ROWS, 8, 64),), {}


def custom_stages():
    from examples.test_custom_stages import make_model

    return make_model(), (torch.randn(ROWS, 64),), {}


def llama_decode(rows):
    from examples.test_llama_decode import DecodeStep

    device = torch.get_default_device()
    return DecodeStep(rows, device), (torch.randint(0, 128, (rows, 1)),), {}


def serving_runner():
    from examples.serving_runner import Ranker

    return Ranker().eval(), (torch.randn(ROWS, 64), 0.7), {"mask": torch.rand(ROWS, 16) < 0.2}


def drop_in_compiler():
    from examples.drop_in_compiler import Scorer

    return Scorer().eval(), (torch.randn(ROWS, 64),), {}


EXAMPLES = {
    "linear classifier": ExampleModel(linear_classifier),
    "cnn": ExampleModel(cnn),
    "transformer of 2 layers": ExampleModel(partial(transformer, 2)),
    "transformer of 4 layers": ExampleModel(partial(transformer, 4)),
    "custom stages": ExampleModel(custom_stages),
    "serving runner": ExampleModel(serving_runner),
    "drop-in compiler": ExampleModel(drop_in_compiler),
    # The cache has one row per sequence, so each batch size has a model of its own.
    **{f"llama decode, batch {rows}": ExampleModel(partial(llama_decode, rows), (rows,)) for rows in BATCH_SIZES},
}

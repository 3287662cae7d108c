"""Example inputs: the user's one example, resized per batch size, copied, and filled with fresh values."""

from __future__ import annotations

from pytest_cudagraph.inputs.adversarial import adversaries, beside, lowered, row_dims
from pytest_cudagraph.inputs.example import Example, changed_tensors, check_device, clone, named_tensors
from pytest_cudagraph.inputs.fresh import fresh
from pytest_cudagraph.inputs.resize import (
    Resizing,
    batch_examples,
    batched_dims,
    check_sizes,
    example_batch_size,
    resizing,
)

__all__ = [
    "Example",
    "Resizing",
    "adversaries",
    "batch_examples",
    "batched_dims",
    "beside",
    "changed_tensors",
    "check_device",
    "check_sizes",
    "clone",
    "example_batch_size",
    "fresh",
    "lowered",
    "named_tensors",
    "resizing",
    "row_dims",
]

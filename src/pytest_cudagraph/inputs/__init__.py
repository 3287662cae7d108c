"""Example inputs: resize the user's example for each batch size, copy it, and fill it with new values."""

from pytest_cudagraph.inputs.batching import (
    Resizing,
    batch_examples,
    batched_dims,
    check_sizes,
    example_batch_size,
    resizing,
)
from pytest_cudagraph.inputs.drawing import with_draw
from pytest_cudagraph.inputs.example import (
    Example,
    changed_tensors,
    check_device,
    clone,
    has_same_inputs,
    named_tensors,
)
from pytest_cudagraph.inputs.new_values import adversaries, beside, fresh, lowered, row_dims

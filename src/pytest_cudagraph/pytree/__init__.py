"""Flatten nested inputs and outputs to lists of leaves, and rebuild them."""

from pytest_cudagraph.pytree.containers import entries_of
from pytest_cudagraph.pytree.leaves import (
    LEAF,
    LeafReader,
    Structure,
    flatten,
    has_same_tensors,
    is_array,
    is_exhaustible,
    kind_of,
    map_tensors,
    named_leaves,
    paths,
    same_bits,
    steps,
    tensors_in,
    unflatten,
    written_order,
)

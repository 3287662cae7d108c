"""Nested inputs and outputs, to flat lists of leaves and back."""

from pytest_cudagraph.pytree.leaves import (
    LEAF,
    Structure,
    flatten,
    has_same_tensors,
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

__all__ = [
    "LEAF",
    "Structure",
    "flatten",
    "has_same_tensors",
    "is_exhaustible",
    "kind_of",
    "map_tensors",
    "named_leaves",
    "paths",
    "same_bits",
    "steps",
    "tensors_in",
    "unflatten",
    "written_order",
]

"""What a graph can return: something with tensors in it, which every replay overwrites."""

from __future__ import annotations

from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.errors import InputError


def check_output(output: Any) -> list[torch.Tensor]:
    """The tensors of an output; :class:`~pytest_cudagraph.errors.InputError` where a replay could not renew it."""
    named = leaves.named_leaves(output)
    for path, leaf in named:
        if leaves.is_exhaustible(leaf):
            raise InputError(
                f"output{path} is a {type(leaf).__name__}: it can be read once, while a graph returns the same "
                "output at every replay; return a list or a tuple"
            )
    tensors = [leaf for _, leaf in named if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise InputError(
            f"the output ({type(output).__name__}) holds no tensor that a replay could renew; "
            "return a tensor, or tensors in lists, tuples, dicts or dataclasses"
        )
    return tensors

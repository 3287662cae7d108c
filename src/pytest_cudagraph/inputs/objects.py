"""Arguments that are neither tensors nor nests of them: a cache keeps state between calls as a module does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.inputs.example import Example

_PLAIN = bool | int | float | complex | str | bytes | range | torch.dtype | torch.device | torch.Size | None


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf is an object to look into: no tensor, and no plain value that ``==`` compares."""
    return not isinstance(leaf, torch.Tensor | _PLAIN)


def opaque_arguments(examples: Iterable[Example]) -> dict[str, Any]:
    """The opaque objects among the arguments, each once, by name: ``args[1]``, ``kwargs['cache']``."""
    found: dict[str, Any] = {}
    for example in examples:
        named = [(f"args{path}", leaf) for path, leaf in leaves.named_leaves(example.args)]
        named += [(f"kwargs{path}", leaf) for path, leaf in leaves.named_leaves(example.kwargs)]
        for name, leaf in named:
            if is_opaque(leaf) and all(leaf is not other for other in found.values()):
                # Examples of several batch sizes may hold an object each in the same place.
                found[name if name not in found else f"{name} no. {len(found) + 1}"] = leaf
    return found

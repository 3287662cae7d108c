"""Checks operations before they run on a GPU, where invalid arguments would make the device unusable.

For an index out of range, a CPU raises ``IndexError``. A GPU kernel fails a device-side assert instead, and the process
cannot use that GPU any more. Unusual inputs must not end a test session in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_cudagraph.backends.capture_mode import ObservingMode

_Arguments = Sequence[Any]


class WouldTrapError(Exception):
    """The operation was not run: its kernel would fail a device-side assert, or it cannot be checked."""


class TrapGuard(ObservingMode):
    """Raises :class:`WouldTrapError` before an operation that would trap. Each check waits for the device."""

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            raise WouldTrapError(f"{func} cannot be checked")
        name = func.overloadpacket._qualified_op_name
        namespace, _, base = name.partition("::")
        if namespace not in ("aten", "prims", "prim"):
            raise WouldTrapError(f"{name} cannot be checked")
        is_safe = _RULES.get(base) or _RULES.get(base.rstrip("_"))
        if is_safe is not None and not is_safe(args):
            raise WouldTrapError(f"{name} would trap")
        return func(*args, **kwargs)


def _within(indices: Any, size: int, *, from_end: bool = False) -> bool:
    if not isinstance(indices, torch.Tensor) or not indices.numel() or indices.is_floating_point():
        return True
    return -size * from_end <= int(indices.min()) and int(indices.max()) < size


def _between_0_and_1(args: _Arguments, at: int = 0) -> bool:
    given = args[at] if len(args) > at else None
    return not isinstance(given, torch.Tensor) or bool(((given >= 0) & (given <= 1)).all())


def _rows_of_table(args: _Arguments) -> bool:
    return _within(args[1], args[0].shape[0])


def _along_dimension(args: _Arguments) -> bool:
    tensor, dim, index = args[0], args[1], args[2]
    return _within(index, tensor.shape[dim] if tensor.ndim else 1)


def _among_all(args: _Arguments) -> bool:
    return _within(args[1], args[0].numel(), from_end=True)


def _by_indices(args: _Arguments) -> bool:
    tensor, dim = args[0], 0
    for index in args[1]:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if not is_mask and not _within(index, tensor.shape[dim], from_end=True):
            return False
        dim += index.ndim if is_mask else 1
    return True


def _classes(args: _Arguments) -> bool:
    scores, target, ignored = args[0], args[1], args[4] if len(args) > 4 else -100
    return _within(target[target != ignored], scores.shape[1 if scores.ndim > 1 else 0])


def _weights_to_draw_by(args: _Arguments) -> bool:
    given = args[0]
    return bool((given.isfinite() & (given >= 0)).all()) and bool((given.sum(-1) > 0).all())


_RULES: Mapping[str, Callable[[_Arguments], bool]] = {
    "embedding": _rows_of_table,
    "_embedding_bag": _rows_of_table,
    "_embedding_bag_forward_only": _rows_of_table,
    "embedding_renorm": _rows_of_table,
    "gather": _along_dimension,
    "index_select": _along_dimension,
    "index_add": _along_dimension,
    "index_copy": _along_dimension,
    "index_fill": _along_dimension,
    "index_reduce": _along_dimension,
    "scatter": _along_dimension,
    "scatter_add": _along_dimension,
    "scatter_reduce": _along_dimension,
    "take": _among_all,
    "put": _among_all,
    "index": _by_indices,
    "_unsafe_index": _by_indices,
    "index_put": _by_indices,
    "_index_put_impl": _by_indices,
    "_unsafe_index_put": _by_indices,
    "nll_loss_forward": _classes,
    "nll_loss2d_forward": _classes,
    "multinomial": _weights_to_draw_by,
    "bernoulli": _between_0_and_1,
    "bernoulli_": lambda args: _between_0_and_1(args, 1),
    "binary_cross_entropy": _between_0_and_1,
    "_assert_async": lambda args: bool(args[0].all()),
}
"""By the name of an operation: whether its kernel accepts these positional arguments."""

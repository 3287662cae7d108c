"""Where the batch dimension of every tensor is: from one number or a tree, to one entry a leaf."""

from __future__ import annotations

from typing import Any

from pytest_cudagraph import leaves
from pytest_cudagraph.errors import InputError

DEFAULT_DIM = 0
"""For arguments that a tree does not name."""

_TAKES = (
    "it takes an int, None for tensors without a batch dimension, a tuple with one entry for each positional argument, "
    "a dict of keyword arguments, or (positional, keywords)"
)


def batch_dims(batch_dim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """The batch dimension of each leaf of ``(args, kwargs)``, in the order of :func:`leaves.flatten`.

    Raises :class:`InputError` for a tree that does not match the arguments.
    """
    _, structure = leaves.flatten((args, kwargs))
    of_args, of_kwargs = structure.children
    if batch_dim is None or _is_int(batch_dim):
        return _matched(batch_dim, structure, "batch_dim")
    if isinstance(batch_dim, dict):
        return _matched(DEFAULT_DIM, of_args, "batch_dim") + _matched(batch_dim, of_kwargs, "batch_dim")
    if not isinstance(batch_dim, tuple | list):
        raise InputError(f"batch_dim={batch_dim!r} is a {type(batch_dim).__name__}; {_TAKES}")
    return _from_sequence(batch_dim, of_args, of_kwargs)


def _from_sequence(batch_dim: Any, of_args: leaves.Structure, of_kwargs: leaves.Structure) -> list[int | None]:
    """One entry for each positional argument; where that does not fit, a pair of both kinds of arguments."""
    try:
        return _matched(batch_dim, of_args, "batch_dim") + _matched(DEFAULT_DIM, of_kwargs, "batch_dim")
    except InputError:
        if len(batch_dim) != 2 or not (isinstance(batch_dim[1], dict) or of_kwargs.children):
            raise
    return _matched(batch_dim[0], of_args, "batch_dim[0]") + _matched(batch_dim[1], of_kwargs, "batch_dim[1]")


def _matched(entry: Any, structure: leaves.Structure, where: str) -> list[int | None]:
    if entry is None or _is_int(entry):
        return [entry] * len(leaves.paths(structure))
    children = structure.children
    if not isinstance(entry, dict | tuple | list):
        raise InputError(f"{where}={entry!r} is a {type(entry).__name__}; {_TAKES}")
    needs = object if isinstance(entry, dict) else tuple | list
    if structure.node is None or not issubclass(structure.node, needs):
        raise InputError(f"{where}={entry!r} does not match the example: there is {_kind(structure)} there; {_TAKES}")
    if isinstance(entry, dict):
        return _matched_names(entry, structure, where)
    if len(entry) != len(children):
        raise InputError(f"{where}={entry!r} has {len(entry)} entries where the example has {len(children)}; {_TAKES}")
    pairs = zip(entry, children, strict=True)
    return [dim for position, (e, c) in enumerate(pairs) for dim in _matched(e, c, f"{where}[{position}]")]


def _matched_names(entry: dict[Any, Any], structure: leaves.Structure, where: str) -> list[int | None]:
    """Names match dict keys and the fields of dataclasses and named tuples; those not named have the default."""
    steps = leaves.steps(structure)
    unknown = [key for key in entry if f"[{key!r}]" not in steps and f".{key}" not in steps]
    if unknown:
        there = ", ".join(step.strip("[].'") for step in steps) or "none"
        raise InputError(
            f"{where} names {unknown[0]!r}, which the example does not have there (it has: {there}); {_TAKES}"
        )
    by_step = {f"[{key!r}]": (key, sub) for key, sub in entry.items()}
    by_step |= {f".{key}": (key, sub) for key, sub in entry.items()}
    found: list[int | None] = []
    for step, child in zip(steps, structure.children, strict=True):
        key, sub = by_step.get(step, (step, DEFAULT_DIM))
        found += _matched(sub, child, f"{where}[{key!r}]")
    return found


def _kind(structure: leaves.Structure) -> str:
    return "a single value" if structure.node is None else f"a {structure.node.__name__}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

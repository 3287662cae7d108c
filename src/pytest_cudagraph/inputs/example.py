"""The example arguments of a model: names, checks, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The arguments of one call: pytrees of tensors, plain values and opaque objects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawing: Drawing | None = None
    """Draws new values for these arguments as the user wants them. None: they are drawn from this example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What a user's ``draw`` gives for one batch size: ``call(seed)``."""

    call: Callable[[int], Example]
    count: int
    """How many different examples there are. 0 for a function."""


def named_tensors(example: Example) -> dict[str, torch.Tensor]:
    """Every tensor by its name in error messages: ``args[0]``, ``kwargs['mask']``."""
    named = pytree.named_leaves((example.args, example.kwargs))
    return {argument_name(path): leaf for path, leaf in named if isinstance(leaf, torch.Tensor)}


def has_same_inputs(first: Example, second: Example) -> bool:
    """Whether two examples hold the same bits."""
    ones, others = (pytree.tensors_in((example.args, example.kwargs)) for example in (first, second))
    return all(pytree.same_bits(one, other) for one, other in zip(ones, others, strict=True))


def changed_tensors(before: Example, after: Example) -> tuple[str, ...]:
    """The names of tensors of ``before`` that hold other bits in ``after``.

    Removed items are not listed, since a model may remove items of a dict argument.
    """
    now = named_tensors(after)
    then = named_tensors(before)
    return tuple(name for name, tensor in then.items() if name in now and not pytree.same_bits(tensor, now[name]))


def argument_name(path: str) -> str:
    """``args[0]`` or ``kwargs['mask']``, from a path into the pair ``(args, kwargs)``."""
    return ("args" if path.startswith("[0]") else "kwargs") + path[len("[0]") :]


def check_leaves(example: Example) -> None:
    """Raise :class:`InputError` for leaves that one call uses up, and for tensors that are not strided."""
    for path, leaf in pytree.named_leaves((example.args, example.kwargs)):
        name = argument_name(path)
        if pytree.is_exhaustible(leaf):
            raise InputError(
                f"{name} is a {type(leaf).__name__}, which the first call would use up, but there are many calls: "
                "pass a list or a tuple"
            )
        if isinstance(leaf, torch.Tensor) and (leaf.is_quantized or isinstance(leaf, FakeTensor)):
            kind, remedy = ("quantized", "as .dequantize()") if leaf.is_quantized else ("fake", "with values")
            raise InputError(
                f"{name} is a {kind} tensor, but graphs take only tensors whose values can be set: pass it {remedy}"
            )
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            layout = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            remedy = ".to_padded_tensor(0.0)" if leaf.is_nested else ".to_dense()"
            raise InputError(
                f"{name} is a {layout} tensor, but graphs take only strided tensors, because capture fixes the address "
                f"and the size of every input: pass it as {remedy}"
            )


def check_device(example: Example, device: str | torch.device) -> None:
    """Raise :class:`InputError` naming the first tensor that is not on ``device``."""
    wanted = torch.device(device)
    for name, tensor in named_tensors(example).items():
        found = tensor.device
        if found.type != wanted.type or wanted.index not in (None, found.index):
            raise InputError(f"{name} is on {found}, but this run uses {wanted}: pass it as .to({str(wanted)!r})")


def check_one_device(example: Example) -> None:
    """Raise :class:`InputError` if the tensors are on several devices."""
    tensors = named_tensors(example)
    first_name, first = next(iter(tensors.items()), ("", None))
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            raise InputError(
                f"all example inputs must be on one device, but {first_name} is on {first.device} and {name} is on "
                f"{tensor.device}: pass it as .to({str(first.device)!r})"
            )


def clone(example: Example) -> Example:
    """Copies of the tensors with the same strides. Plain values and opaque objects are shared."""
    return map_example(example, lambda tensor: filled_like(tensor, tensor))


def map_example(example: Example, function: Callable[[torch.Tensor], torch.Tensor]) -> Example:
    """``example`` with ``function(tensor)`` for each tensor. A tensor that is passed twice stays one tensor."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    with torch.no_grad():
        args, kwargs = pytree.map_tensors(once, (example.args, example.kwargs))
    return Example(args=args, kwargs=kwargs)


def filled_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A new tensor with the size, strides, dtype and device of ``tensor`` that holds ``values``."""
    expanded = [dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim] > 1]
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps if size > 0)
    distinct = tensor.numel()
    for dim in expanded:
        distinct //= tensor.shape[dim]
    if reach < distinct:  # overlapping windows (unfold) cannot hold arbitrary values
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(values)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    target = made
    for dim in expanded:  # torch cannot write to an expanded dimension: write one slice
        target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return made


Named = Sequence[tuple[str, Any]]
"""Leaves of the pair ``(args, kwargs)``, with their paths."""


def container_changes(before: Named, after: Named) -> Iterator[tuple[str, str, Any]]:
    """For each new leaf: its name, ``added`` or ``replaced``, and the leaf.

    Removed items are not listed, since a model may remove items of a dict argument.
    """
    then = dict(before)
    for path, leaf in after:
        if path not in then:
            yield argument_name(path), "added", leaf
        elif leaf is not then[path]:
            yield argument_name(path), "replaced", leaf


_PLAIN = bool | int | float | complex | str | bytes | range | torch.dtype | torch.device | torch.Size | None


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf is neither a tensor nor a plain value that ``==`` compares."""
    return not isinstance(leaf, torch.Tensor | _PLAIN)


def opaque_arguments(examples: Iterable[Example]) -> dict[str, Any]:
    """The opaque objects among the arguments, each once, by name: ``args[1]``, ``kwargs['cache']``."""
    found: dict[str, Any] = {}
    for example in examples:
        named = [(f"args{path}", leaf) for path, leaf in pytree.named_leaves(example.args)]
        named += [(f"kwargs{path}", leaf) for path, leaf in pytree.named_leaves(example.kwargs)]
        for name, leaf in named:
            if is_opaque(leaf) and all(leaf is not other for other in found.values()):
                # Examples of several batch sizes may hold different objects at the same name.
                found[name if name not in found else f"{name} no. {len(found) + 1}"] = leaf
    return found

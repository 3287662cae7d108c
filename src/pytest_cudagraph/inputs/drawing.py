"""New inputs that the user gives: from a function that draws them, or as several examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import InputError, first_line
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs.batching import batch_examples
from pytest_cudagraph.inputs.example import Drawing, Example, argument_name, filled_like, map_example

_TAKES = (
    "draw takes a function of a torch.Generator, or a list of further examples. Each gives the positional arguments as "
    "a tuple (one argument needs none), or (positional, keywords) for a call with kwargs"
)


def with_draw(examples: Mapping[int, Example], draw: Any, batch_dim: Any) -> dict[int, Example]:
    """The same examples, whose new values come from ``draw``: a function of a CPU generator, or several examples.

    What it gives is resized to each batch size like the example. Raises :class:`InputError` for another form than the
    example's: nesting, shapes, dtypes, and plain values, which a graph keeps. A function is tried once.
    """
    if draw is None:
        return dict(examples)
    is_list = isinstance(draw, Sequence) and not isinstance(draw, str | bytes) and len(draw) > 0
    if not callable(draw) and not is_list:
        raise InputError(f"{_TAKES}; found {value_text(draw)}")
    given: tuple[Any, ...] | None = None if callable(draw) else tuple(draw)
    made = {}
    for size, example in examples.items():
        fitted = functools.partial(_fitted, example=example, size=size, batch_dim=batch_dim)
        if given is None:
            drawing = Drawing(call=functools.partial(_drawn, draw, fitted), count=0)
            drawing.call(0)
        else:
            # The example itself is one of them, and seed 1 gives the next one.
            drawing = Drawing(call=functools.partial(_picked, (example, *map(fitted, given))), count=len(given) + 1)
        made[size] = replace(example, drawing=drawing)
    return made


def _drawn(draw: Callable[[torch.Generator], Any], fitted: Callable[[Any], Example], seed: int) -> Example:
    try:
        value = draw(torch.Generator().manual_seed(seed))
    # The user's function may raise anything.
    except Exception as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame
        raise InputError(f"draw raised {first_line(error)}") from error.with_traceback(own)
    return fitted(value)


def _picked(given: tuple[Example, ...], seed: int) -> Example:
    return given[seed % len(given)]


def _fitted(value: Any, *, example: Example, size: int, batch_dim: Any) -> Example:
    """What ``draw`` gave, in the memory format and on the device of the example of this batch size."""
    given = _arguments(value, example)
    if given is None or _structure(given) != _structure(example):
        found = f"a {type(value).__name__} alone" if given is None else _names(given)
        raise InputError(f"{_TAKES}; the example has {_names(example)}, found {found}")
    resized = batch_examples(_moved(given, example), (size,), batch_dim)[size]
    leaves, structure = pytree.flatten((example.args, example.kwargs))
    drawn, _ = pytree.flatten((resized.args, resized.kwargs))
    for path, leaf, new in zip(pytree.paths(structure), leaves, drawn, strict=True):
        _check_form(argument_name(path), leaf, new, size)
    old = dict(zip(map(id, drawn), leaves, strict=True))
    return map_example(resized, lambda tensor: filled_like(old[id(tensor)], tensor))


def _moved(given: Example, example: Example) -> Example:
    """On the device of the example: a seed must give the same values everywhere, so they are drawn on the CPU."""
    tensors = pytree.tensors_in((example.args, example.kwargs))
    return map_example(given, lambda tensor: tensor.to(tensors[0].device)) if tensors else given


def _arguments(value: Any, example: Example) -> Example | None:
    """The value as arguments, as far as its outermost tuple tells. None if the keywords are missing."""
    positional: Any = value
    keywords: Any = {}
    if example.kwargs:
        is_pair = type(value) in (tuple, list) and len(value) == 2
        positional, keywords = value if is_pair else ((), value)
    if not isinstance(keywords, Mapping):
        return None
    is_several = type(positional) in (tuple, list)
    return Example(args=tuple(positional) if is_several else (positional,), kwargs=dict(keywords))


def _check_form(name: str, leaf: Any, new: Any, size: int) -> None:
    if isinstance(leaf, torch.Tensor) and isinstance(new, torch.Tensor):
        fits = (leaf.shape, leaf.dtype) == (new.shape, new.dtype)
    else:
        fits = new is leaf or (type(new) is type(leaf) and not isinstance(leaf, torch.Tensor) and (new == leaf) is True)
    if not fits:
        raise InputError(
            f"what draw gives has the shapes, dtypes and plain values of the example; {name} is {_text(leaf)} there, "
            f"found {_text(new)} (both at batch size {size}): draw other values of the same form"
        )


def _text(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return value_text(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def _structure(example: Example) -> pytree.Structure:
    return pytree.flatten((example.args, example.kwargs))[1]


def _names(example: Example) -> str:
    return ", ".join(argument_name(path) for path in pytree.paths(_structure(example))) or "no arguments"

"""Between a model's nested arguments and the flat lists of tensors that a package takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.inputs.example import argument_name
from pytest_cudagraph.protocols import CompiledRegion, Model

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a tensor must be to be passed to compiled code."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """The place that ``tensor`` fits."""
        return cls(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def fits(self, value: Any) -> bool:
        """Whether ``value`` is such a tensor, its strides aside."""
        if not isinstance(value, torch.Tensor):
            return False
        return (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with the strides of this place; a package addresses memory by them, and does not look."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(tensor)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The nesting of a value, its plain values as they are, and the places of its tensors, by position."""

    structure: leaves.Structure
    plain: tuple[Any, ...]
    """All leaves; None where a tensor stands."""
    places: Mapping[int, Place]

    @classmethod
    def of(cls, value: Any) -> Layout:
        """The layout of ``value``."""
        flat, structure = leaves.flatten(value)
        places = {i: Place.of(leaf) for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
        plain = tuple(None if i in places else leaf for i, leaf in enumerate(flat))
        return cls(structure=structure, plain=plain, places=places)

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value with these tensors in their places."""
        flat = list(self.plain)
        for i, tensor in zip(self.places, tensors, strict=True):
            flat[i] = tensor
        return leaves.unflatten(self.structure, flat)

    def tensors_of(self, value: Any) -> list[torch.Tensor]:
        """The tensors of arguments of this layout; :class:`InputError` names the first one that differs."""
        flat, structure = leaves.flatten(value)
        if structure != self.structure:
            raise InputError("the package takes arguments nested as in the example inputs; these are nested otherwise")
        for i, leaf in enumerate(flat):
            self._check(i, leaf)
        return [place.laid_out(flat[i]) for i, place in self.places.items()]

    def _check(self, position: int, leaf: Any) -> None:
        place, plain = self.places.get(position), self.plain[position]
        if place.fits(leaf) if place else leaf is plain or leaf == plain:
            return
        where = argument_name(leaves.paths(self.structure)[position])
        expected = place or repr(plain)
        found = Place.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
        raise InputError(f"{where}: the package is compiled for {expected}; found {found}")


class Result:
    """What a traced call returned. An object of its own, since export puts a module's attributes back."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """The nesting of the result; known once the model was traced."""
        if self._layout is None:
            raise CudagraphError("the model was not called while it was exported")
        return self._layout

    def take(self, value: Any) -> tuple[torch.Tensor, ...]:
        """Remember the layout of ``value``; its tensors."""
        for path, leaf in leaves.named_leaves(value):
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise CudagraphError(
                    f"output{path} is of type {type(leaf).__name__}; a package returns tensors and plain values only\n"
                    "  to fix: return dicts, lists or tuples of these (transformers: use_cache=False), "
                    "or use compile='inductor'"
                )
        self._layout = Layout.of(value)
        return tuple(leaves.tensors_in(value))


class FlatModel(torch.nn.Module):
    """The model from a flat list of tensors to a flat list of tensors: all that a package can hold."""

    def __init__(self, model: Model, arguments: Layout) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.result = Result()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rebuild the arguments, call, and keep the nesting of the result aside."""
        args, kwargs = self.arguments.fill(tensors)
        return self.result.take(self.model(*args, **kwargs))


class NestedCall:
    """A package with the signature of the model it was made from."""

    def __init__(self, region: CompiledRegion, arguments: Layout, result: Layout) -> None:
        self._region = region
        self._arguments = arguments
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package; :class:`~pytest_cudagraph.errors.InputError` where it was compiled for other arguments."""
        return self._result.fill(self._region(*self._arguments.tensors_of((args, kwargs))))

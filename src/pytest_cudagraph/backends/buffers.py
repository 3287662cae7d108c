"""The fixed buffers of a captured graph: static inputs, and outputs that a test can poison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pytest_cudagraph import pytree
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.pytree import LeafReader, Structure, flatten, map_tensors, paths, unflatten
from pytest_cudagraph.values import Receipt

_is_inference = torch.is_inference_mode_enabled


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, integers with their largest value, booleans with True."""
    with torch.inference_mode():
        tensor.fill_(poison_value(tensor.dtype))


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """The value that :func:`poison` fills in."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def check_output(output: Any) -> list[torch.Tensor]:
    """The tensors of an output. Raises :class:`~pytest_cudagraph.errors.InputError` if a replay cannot renew it."""
    named = pytree.named_leaves(output)
    for path, leaf in named:
        if pytree.is_exhaustible(leaf):
            raise InputError(
                f"output{path} is a {type(leaf).__name__}: it can be read once, while a graph returns the same "
                "output at every replay; return a list or a tuple"
            )
    tensors = [leaf for _, leaf in named if isinstance(leaf, torch.Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise InputError(
            "the output holds a fake tensor, which has no values; return tensors that were computed outside of a "
            "FakeTensorMode"
        )
    if not tensors:
        raise InputError(
            f"the output ({type(output).__name__}) holds no tensor that a replay could renew; "
            "return a tensor, or tensors in lists, tuples, dicts or dataclasses"
        )
    return tensors


_REMEDY = "pad the inputs to the captured shape, or capture another graph"


class _Buffer(NamedTuple):
    """One captured tensor argument. ``position`` counts the leaves of all arguments."""

    position: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor


class StaticInputs:
    """Copies of the example's tensors at fixed addresses, and its plain Python arguments.

    The buffers are no inference tensors, so that they can be written in any grad mode.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given, self._structure = flatten((args, dict(kwargs)))
        leaves = [_own_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        self._plain = [(at, leaf) for at, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
        self._buffers = [
            _Buffer(at, leaf.shape, leaf.dtype, leaf.device, leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self._groups = _by_dtype(self._buffers)
        self._reader = LeafReader(self._structure)
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.args, self.kwargs = unflatten(self._structure, leaves)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The buffers in new containers, since a model may take items out of a dict."""
        args, kwargs = map_tensors(lambda tensor: tensor, (self.args, self.kwargs))
        return args, kwargs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, in the order of the arguments."""
        return [buffer.tensor for buffer in self._buffers]

    @property
    def bytes(self) -> int:
        """The total size of the buffers."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def copy_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy a call's tensors into the buffers on the current stream, without waiting.

        Raises :class:`~pytest_cudagraph.errors.InputError` for another structure, shape, dtype or device, and for a
        plain argument that differs from the captured one. No buffer is changed then.
        """
        __tracebackhide__ = True
        leaves = self._reader.read(args, kwargs)
        if leaves is None or self._misfit(leaves):
            leaves, structure = flatten((args, kwargs))
            if structure != self._structure:
                raise InputError(_structure_text(self._structure, structure))
            if misfit := self._misfit(leaves):
                raise InputError(misfit)
        self.copy_leaves(leaves)

    def copy_leaves(self, leaves: Sequence[Any]) -> None:
        """As :meth:`copy_in`, for leaves that the caller has compared with those of the capture."""
        if _is_inference():
            self._copy(leaves)
        else:
            # Otherwise a source that requires grad would add the buffer to an autograd graph.
            with torch.no_grad():
                self._copy(leaves)

    def _misfit(self, leaves: Sequence[Any]) -> str:
        """The error for the first leaf that is not as captured; empty if all are."""
        for at, captured in self._plain:
            if leaves[at] is not captured and not _is_equal(leaves[at], captured):
                return self._plain_text(at, captured, leaves[at])
        for buffer in self._buffers:
            if not _fits(buffer, leaves[buffer[0]]):
                return self._tensor_text(buffer, leaves[buffer[0]])
        return ""

    def _copy(self, leaves: Sequence[Any]) -> None:
        for targets, positions in self._groups:
            if len(targets) == 1:
                targets[0].copy_(leaves[positions[0]])
            else:
                torch._foreach_copy_(targets, [leaves[at] for at in positions])

    def _tensor_text(self, buffer: _Buffer, given: Any) -> str:
        name, captured = argument_names(self._structure)[buffer.position], describe(buffer.tensor)
        return f"{name}: the graph was captured for {captured}; this call gives {describe(given)}\n{_REMEDY}"

    def _plain_text(self, position: int, captured: Any, given: Any) -> str:
        name = argument_names(self._structure)[position]
        return (
            f"{name}: {captured!r} is baked into the graph; this call gives {describe(given)}\n"
            "capture another graph for this value, or make the argument a tensor"
        )


class BufferedGraph(ABC):
    """The part that graphs of both backends share: the buffers, the receipt and the count of replays."""

    def __init__(self, inputs: StaticInputs, output: Any, receipt: Receipt) -> None:
        self._inputs: StaticInputs | None = inputs  # None when closed
        self._output = output
        self._receipt = receipt
        self._replays = 0

    @property
    def receipt(self) -> Receipt:
        """What was captured, and at what cost."""
        return self._receipt

    @property
    def replays(self) -> int:
        """Launches since capture."""
        return self._replays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the arguments in, replay, return the captured output, which the next replay overwrites."""
        __tracebackhide__ = True
        if self._inputs is None:
            raise self._closed_error()
        self._inputs.copy_in(args, kwargs)
        return self.replay()

    def replay_leaves(self, leaves: Sequence[Any]) -> Any:
        """As a call, for leaves of arguments that are known to fit."""
        if self._inputs is None:
            raise self._closed_error()
        self._inputs.copy_leaves(leaves)
        return self.replay()

    @abstractmethod
    def replay(self) -> Any:
        """Replay on the values that the static inputs hold now."""

    def _closed_error(self) -> CudagraphError:
        return CudagraphError(f"the graph of batch size {self._receipt.batch_size} is closed; capture it again")


def argument_names(structure: Structure) -> list[str]:
    """The name of each leaf of ``(args, kwargs)``: ``args[0]``, ``kwargs['mask']``."""
    roots = {"[0]": "args", "[1]": "kwargs"}
    return [roots[path[:3]] + path[3:] for path in paths(structure)]


def describe(value: Any) -> str:
    """``float32 (8, 512) on cuda:0`` for a tensor, and the value itself for anything else."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()


def _by_dtype(buffers: list[_Buffer]) -> list[tuple[list[torch.Tensor], list[int]]]:
    # One launch can copy a list only if its tensors have one dtype.
    groups: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
    for buffer in buffers:
        targets, positions = groups.setdefault(buffer.dtype, ([], []))
        targets.append(buffer.tensor)
        positions.append(buffer.position)
    return list(groups.values())


def _fits(buffer: _Buffer, given: Any) -> bool:
    _, shape, dtype, device, _ = buffer
    return (
        # This runs at every replay, and isinstance of a tensor calls Python code of torch.
        (type(given) is torch.Tensor or isinstance(given, torch.Tensor))
        and given.shape == shape
        and given.dtype is dtype
        and given.device == device
    )


def _is_equal(given: Any, captured: Any) -> bool:
    # 1, 1.0 and True are equal but compute different results. A comparison may also return an array.
    return type(given) is type(captured) and (given == captured) is True


def _structure_text(captured: Structure, given: Structure) -> str:
    wanted, found = argument_names(captured), argument_names(given)
    if wanted == found:
        return f"the containers of the arguments have other types than at capture\n{_REMEDY}"
    return (
        f"the graph was captured for {', '.join(wanted) or 'no arguments'}; "
        f"this call gives {', '.join(found) or 'no arguments'}\n{_REMEDY}"
    )

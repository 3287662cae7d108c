"""What holds for a thread while it captures: its modes, who observes its operations, and which calls are refused."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from pytest_cudagraph.backends.buffers import BufferedGraph
from pytest_cudagraph.hazards import CAPTURE_UNSUPPORTED, NESTED_REPLAY_TEXT, RNG_STATE_TEXT, UNPINNED_COPY_TEXT
from pytest_cudagraph.sources import user_frame
from pytest_cudagraph.sources.device_arguments import asked_device
from pytest_cudagraph.sources.syntax import is_host, names_host


class _Thread(threading.local):
    captures = 0


_THREAD = _Thread()


@contextmanager
def capturing() -> Iterator[None]:
    """Mark this thread as capturing, warm-up included. See :func:`is_capturing`."""
    _THREAD.captures += 1
    try:
        yield
    finally:
        _THREAD.captures -= 1


def is_capturing() -> bool:
    """Whether this thread is between the first warm-up and the end of a capture.

    A server of graphs then calls its model instead. CUDA cannot launch a graph inside a capture, and the model's
    kernels belong to the outer graph. Waiting for a thread that waits to capture would be a deadlock.
    """
    return _THREAD.captures > 0


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts on this type of device, or None where it is off."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Turn off autocast's cache of cast weights: a graph that reads such a copy would never see new weights."""
    # Compiled code has a guard on this setting. A needless change would compile it again.
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


_READS = ("tolist", "numpy", "__array__", "cpu", "__repr__", "__format__")
_SEEDS = ("manual_seed", "seed")
_STATES = ("initial_seed", "get_rng_state", "set_rng_state")


class RefusedCall(NamedTuple):
    """One function that a capture refuses, with the id of its hazard and the text of CUDA or PyTorch."""

    owner: Any
    owner_name: str
    name: str
    hazard: str = "host-sync"
    text: str = CAPTURE_UNSUPPORTED.text
    is_legal_on_host: bool = False
    """Whether the call is legal unless its first argument is a tensor on the device."""

    @property
    def label(self) -> str:
        """``Tensor.numpy``, ``torch.manual_seed``."""
        return f"{self.owner_name}.{self.name}"


def refused_calls() -> Iterator[RefusedCall]:
    """The functions that this version of torch has.

    ``Tensor.to`` is refused only for :func:`moves_to_host`, ``torch.tensor`` only for :func:`sends_number`.
    """
    for name in (*_READS, "to"):
        yield RefusedCall(torch.Tensor, "Tensor", name, is_legal_on_host=True)
    yield RefusedCall(torch.Tensor, "Tensor", "pin_memory")
    for name in ("tensor", "as_tensor"):
        yield RefusedCall(torch, "torch", name, "host-data", UNPINNED_COPY_TEXT)
    for module, label in ((torch, "torch"), (torch.random, "torch.random"), (torch.cuda, "torch.cuda")):
        is_host = module is not torch.cuda
        for name in (*_SEEDS, *_STATES, *(() if is_host else ("manual_seed_all", "seed_all"))):
            yield RefusedCall(module, label, name, "rng", RNG_STATE_TEXT, is_host and name in _STATES)
    graphs: tuple[type, ...] = (torch.cuda.CUDAGraph, *BufferedGraph.__subclasses__())
    for graph in graphs:
        yield RefusedCall(graph, graph.__name__, "replay", "nested-graph", NESTED_REPLAY_TEXT)
    yield RefusedCall(torch.cuda, "torch.cuda", "synchronize")
    if hasattr(torch, "accelerator"):
        yield RefusedCall(torch.accelerator, "torch.accelerator", "synchronize")
    for owner in (torch.cuda.Event, torch.cuda.Stream):
        for name in ("synchronize", "query"):
            if hasattr(owner, name):
                yield RefusedCall(owner, f"torch.cuda.{owner.__name__}", name)


def moves_to_host(args: tuple[Any, ...], kwargs: dict[str, Any], *, by_name: bool) -> bool:
    """Whether ``Tensor.to(*args, **kwargs)`` asks for the CPU. ``by_name``: only if the source names it."""
    if not any(map(is_host, (*args[1:2], kwargs.get("device")))):
        return False
    # On a CPU a variable may hold the model's own device.
    return not by_name or names_host(user_frame(), "to")


def sends_number(source: Any = None, *, device: Any = None, by_name: bool, **_: Any) -> bool:
    """Whether ``torch.tensor`` puts a number on the device. Without a device it stays on the host, as a number.

    The dispatcher shows lists and arrays in any case, and with ``by_name`` also the numbers whose device the source
    shows.
    """
    if isinstance(source, torch.Tensor) or not isinstance(device, torch.device):
        return False
    if not by_name:
        return device.type != "cpu" and not (isinstance(source, list | tuple) and not source)
    return not hasattr(source, "__len__") and asked_device() == "unknown"


Replacement = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of its attribute, and a function from the attribute to its replacement."""

_MISSING = object()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes, and put every one of them back at the end, also after an exception."""
    with ExitStack() as stack:
        for owner, name, make in replacements:
            stack.callback(_put_back, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, make(getattr(owner, name)))
        yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is _MISSING:
        delattr(owner, name)  # the attribute of the base class shows again
    else:
        setattr(owner, name, own)


def claims_capture(is_capturing: Callable[[], bool] = lambda: True) -> Iterator[Replacement]:
    """Let libraries that ask ``torch.cuda.is_current_stream_capturing`` take the branch they take under capture."""

    def claiming(original: Callable[[], bool]) -> Callable[[], bool]:
        return functools.wraps(original)(lambda: is_capturing() or original())

    for module in (torch.cuda, torch.cuda.graphs):
        yield module, "is_current_stream_capturing", claiming


_HAS_OWN_SWITCH = hasattr(TorchDispatchMode, "ignore_compile_internals")


class ObservingMode(TorchDispatchMode):
    """A dispatch mode that leaves compiled code compiled and does not import the compiler.

    Of a tensor that wraps others, such as a DTensor, it observes the operations on these.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # torch then asks the class, whose inner operations come here
        return self.observe(func, types, args, kwargs or {})

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, and look at it."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the mode, and that imports the compiler, which takes over a second.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise one call under the mode makes compiled code eager for the rest of the process.
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # The same for an older torch, which lacks the switch above.
        return not _HAS_OWN_SWITCH


_Mode = TypeVar("_Mode", bound=ObservingMode)


def hidden_from_compiler(kind: type[_Mode]) -> type[_Mode]:
    """The class to use in this process: where torch.compile is loaded, one whose frames it does not compile."""
    return _hidden(cast("Any", kind)) if "torch._dynamo" in sys.modules else kind


@functools.cache
def _hidden(kind: type) -> Any:
    # torch wraps only a method that the class itself defines.
    members = {"__torch_dispatch__": ObservingMode.__torch_dispatch__}
    return type(kind.__name__, (kind,), {**members, "_should_skip_dynamo": classmethod(lambda cls: True)})


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or results, and those inside of a tensor that wraps others."""
    if isinstance(value, torch.Tensor):
        yield from _inner_tensors(value) if is_traceable_wrapper_subclass_type(type(value)) else (value,)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def _inner_tensors(wrapper: Any) -> Iterator[torch.Tensor]:
    for name in wrapper.__tensor_flatten__()[0]:
        yield from tensors_of(getattr(wrapper, name))


def storage_key(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage, or None for layouts that have none (sparse, oneDNN)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # torch has no other way to ask
        return None

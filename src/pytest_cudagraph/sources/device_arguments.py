"""The device that a running call asks for. Torch fills in a missing device, so only the source text tells."""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any, Literal

import torch

from pytest_cudagraph.sources.syntax import name_of, names_host_device, running_call
from pytest_cudagraph.sources.user_lines import calling_frame

Asked = Literal["host", "device", "unknown"]
"""``device``: the call passes one, and the source does not name the CPU."""

_FACTORIES = frozenset(
    """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye fftfreq
    from_numpy full hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn
    randperm range rfftfreq scalar_tensor tensor tril_indices triu_indices zeros
    """.split()
)
"""Functions that make a tensor on the host unless they are given a device."""

_OF_A_TENSOR = frozenset({"new_tensor"})
_TO_HOST = frozenset({"cpu", "numpy", "__array__", "tolist"})
_MOVES = _TO_HOST | {"to"}


def asked_device() -> Asked:
    """Where the running call of a factory puts its tensor: ``torch.zeros(4)``, ``torch.tensor(2.0, device=device)``.

    ``unknown`` for any other call, and with a default device.
    """
    frame = calling_frame()
    # A default device is a torch function mode, which adds the argument below the source text.
    if frame is None or torch._C._len_torch_function_stack():
        return "unknown"
    call = running_call(frame, _FACTORIES | _OF_A_TENSOR)
    return "unknown" if call is None else _asked_by(call, frame)


def target_device() -> Asked:
    """Where the running call moves a tensor: ``Tensor.to``, ``Tensor.cpu``, a factory. ``unknown`` for any other."""
    frame = calling_frame()
    call = None if frame is None else running_call(frame, _MOVES | _FACTORIES)
    if frame is None or call is None:
        return "unknown"
    if name_of(call.func) not in _MOVES:
        return _asked_by(call, frame)
    if name_of(call.func) in _TO_HOST:
        return "host"
    return _place_of(call.args[0] if call.args else _keyword(call), frame)


def _asked_by(call: ast.Call, frame: FrameType) -> Asked:
    if name_of(call.func) in _OF_A_TENSOR:
        return "device"
    # **options may hold a device, and so may the third argument of as_tensor.
    if any(keyword.arg is None for keyword in call.keywords) or (name_of(call.func) == "as_tensor" and call.args[2:]):
        return "unknown"
    return _place_of(_keyword(call), frame)


def _keyword(call: ast.Call) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)


def _place_of(device: ast.expr | None, frame: FrameType) -> Asked:
    if device is None or names_host_device(device):
        return "host"
    if not isinstance(device, ast.Name):
        return "device"
    value = _value(device.id, frame)
    return "host" if value is None or (value == "cpu" and _is_default(device.id, frame)) else "device"


def _is_default(name: str, frame: FrameType) -> bool:
    """Whether the caller leaves out this argument of the running function, as far as its source tells."""
    code, caller = frame.f_code, frame.f_back
    if caller is None or name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    call = running_call(caller, frozenset({code.co_name}))
    if call is None or any(keyword.arg in (None, name) for keyword in call.keywords):
        return False
    # ``self`` is not among the arguments of a call.
    given = len(call.args) + isinstance(call.func, ast.Attribute)
    is_by_name = code.co_varnames.index(name) >= code.co_argcount
    is_open = any(isinstance(each, ast.Starred) for each in call.args)
    return is_by_name or (not is_open and given <= code.co_varnames.index(name))


def _value(name: str, frame: FrameType) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name))

"""The collectives of torch.distributed: how many ranks they join, what they write, and how one runs to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_cudagraph.hazards.argument_rules import SYNC, FromHost, Rule, always, reader
from pytest_cudagraph.hazards.catalogue import RawFinding

_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
_NAMESPACES = _FUNCTIONAL | {"c10d"}

# The host waits for them, whatever the ranks.
_BARRIERS = frozenset({"c10d::barrier", "c10d::monitored_barrier_"})

_WRITES_NOTHING = _BARRIERS | {"c10d::send", "c10d::check_for_nan"}

# They hand on the tensor that a collective made, so that a replay has nothing to compute.
_HAND_ON = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})


def is_collective(func: Any) -> bool:
    """Whether an operator communicates. Its kernel runs on another thread or stream."""
    return func.namespace in _NAMESPACES and func._schema.name not in _HAND_ON


def hands_on(func: Any) -> bool:
    """Whether an operator only returns its argument, or a wrapper of it."""
    return func._schema.name in _HAND_ON


def writes_first_argument(func: Any) -> bool:
    """Whether a collective writes its first argument. The schemas of ``c10d`` do not say so."""
    return func.namespace == "c10d" and func._schema.name not in _WRITES_NOTHING


def rules_of(func: Any) -> list[Rule]:
    """The rules for an operator of torch.distributed: no barrier, and no other rank."""
    if func._schema.name in _BARRIERS:
        return [always(SYNC)]
    named = {argument.name for argument in func._schema.arguments}
    name = next((name for name in ("process_group", "group_name") if name in named), "")
    return [_alone(reader(func, name))] if name else []


def _alone(read: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None) -> RawFinding | None:
        ranks = _size_of(read(args, kwargs))
        text = f"a process group of {ranks} ranks, of which this test sees one"
        return RawFinding(id="collective", text=text) if ranks > 1 else None

    return rule


def _size_of(group: Any) -> int:
    c10d: Any = torch._C._distributed_c10d  # loaded by torch.distributed, which made the group
    found = c10d._resolve_process_group(group) if isinstance(group, str) else c10d.ProcessGroup.unbox(group)
    return int(found.size())


def run_to_end(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a collective after it has finished. The kernels of a CPU run on threads of their own."""
    result = func(*args, **kwargs)
    if func.namespace in _FUNCTIONAL:
        for made in result if isinstance(result, list) else [result]:
            torch.ops._c10d_functional.wait_tensor(made)
        return result
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        torch._C._distributed_c10d.Work.unbox(work).wait()
    return result

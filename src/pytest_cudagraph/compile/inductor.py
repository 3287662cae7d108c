"""Compile mode ``inductor``: ``torch.compile`` for one batch size, and the proof that compiled code runs."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.inputs import Example, clone
from pytest_cudagraph.protocols import Backend, CompiledRegion, Model
from pytest_cudagraph.units import plural

_MANY = 1024
"""Compilations allowed per code object. PyTorch allows 8, and silently runs eager from the ninth on."""


class RegionCompiler:
    """A ``torch.compile`` backend: Inductor without its own CUDA graphs. It wraps the results as regions."""

    def __init__(self, backend: Backend, label: str) -> None:
        self.regions: list[CompiledRegion] = []
        self._backend = backend
        self._label = label

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        # A graph from the AOTAutograd cache would not be wrapped, and its executions would not be counted.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Any = compile_fx(
                graph, inputs, inner_compile=self._compile, config_patches={"triton.cudagraphs": False}
            )
        boxed: Callable[..., Any] = compiled
        return boxed

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        code: Any = compile_fx_inner(graph, inputs, **options)
        region = self._backend.region(lambda *tensors: code(list(tensors)), f"{self._label} {len(self.regions) + 1}")
        self.regions.append(region)
        return _boxed(region)


def _boxed(region: CompiledRegion) -> Callable[[list[Any]], Any]:
    """Inductor's calling convention: one list, which the callee empties to free inputs early."""

    def call(inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()
        return region(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def compile_lazily(model: Model, compiler: RegionCompiler) -> Model:
    """The model under ``torch.compile``. Its first call inside :func:`raised_limits` compiles it."""
    compiled: Model = torch.compile(_own_frame(model), backend=compiler, dynamic=False, fullgraph=False)
    return compiled


def _own_frame(model: Model) -> Model:
    """A function with its own code object that calls ``model``.

    TorchDynamo counts compilations and skips per code object, and all instances of a class share ``forward``. So one
    batch size or test would use up the limit of another one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


@contextmanager
def raised_limits() -> Iterator[None]:
    """Raise TorchDynamo's limits of compilations, and let its errors through."""
    from torch._dynamo import config

    limits = ("recompile_limit", "accumulated_recompile_limit")
    older = ("cache_size_limit", "accumulated_cache_size_limit")
    names = limits if hasattr(config, limits[0]) else older
    with config.patch({**dict.fromkeys(names, _MANY), "suppress_errors": False}):
        yield


ROUNDS = 4
"""The first calls may take other paths (empty caches). A model that still compiles in the last one always does."""


def settle(call: Model, regions: Sequence[CompiledRegion], example: Example) -> None:
    """Call the model until nothing new is compiled and compiled code runs again.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError` if nothing was compiled, if compiled code does not run, or
    if every call compiles something new.
    """
    for _ in range(ROUNDS):
        regions_before, executions_before = len(regions), _executions(regions)
        _call_both_ways(call, example)
        if not regions:
            raise CudagraphError(f"nothing of the model was compiled: {_why_nothing()}")
        if len(regions) > regions_before:
            continue
        if _executions(regions) == executions_before:
            raise CudagraphError(f"compiled code does not run: {_why_skipped(len(regions))}")
        return
    raise CudagraphError(
        f"each of {ROUNDS} equal calls compiled new code ({plural(len(regions), 'region')} so far): it depends on a "
        f"Python value that changes in each call\n  to fix: keep that value in a tensor"
    )


def _call_both_ways(call: Model, example: Example) -> None:
    # TorchDynamo compiles once for tensors made in inference mode and once for others. Later stages use both.
    inference = clone(example)
    with torch.inference_mode(False):
        ordinary = clone(example)
    for each in (ordinary, inference):
        call(*each.args, **each.kwargs)


def _executions(regions: Sequence[CompiledRegion]) -> int:
    return sum(region.executions for region in regions)


def _why_nothing() -> str:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            return f"{name} is set\n  to fix: unset it, or use compile='none'"
    return (
        "TorchDynamo found no graph in it, or skipped it\n"
        "  either torch.compile cannot compile it (a single nn.LSTM, torch.compiler.disable)\n"
        "  or its compiled code ran under a TorchDispatchMode (such as FlopCounterMode): then TorchDynamo skips this "
        "code for the rest of the process\n"
        "  to fix: use compile='none', or call torch._dynamo.reset() after leaving such a mode"
    )


def _why_skipped(regions: int) -> str:
    return (
        f"{plural(regions, 'region')} compiled, but a second call executed none\n"
        "  after a call under a TorchDispatchMode (such as FlopCounterMode) TorchDynamo skips the code for the rest of "
        "the process\n  to fix: leave such modes, then call torch._dynamo.reset()"
    )

"""One capture: begin, run the model once, end, and come out clean whichever of them fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pytest_cudagraph.backends.cuda.diagnosis import diagnose
from pytest_cudagraph.backends.cuda.gpu import Gpu
from pytest_cudagraph.backends.cuda.recovery import recover
from pytest_cudagraph.backends.cuda.refusals import is_unspecific, refusal_of
from pytest_cudagraph.errors import CudagraphError

_EMPTY_GRAPH = "The CUDA Graph is empty"


class _Watched:
    """Calls the model and keeps its error, which the end of an invalidated capture would replace by an echo."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.error: BaseException | None = None

    def __call__(self) -> Any:
        try:
            return self._call()
        except BaseException as error:
            self.error = error
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """A graph to be captured into, and what its capture needs."""

    graph: Any
    handle: Any
    """The pool its memory comes from."""
    is_shared: bool
    """Whether open graphs use that pool already."""
    keeps: bool
    """Whether it was made with ``keep_graph``: torch would leave its instantiation to the first launch."""
    generators: tuple[torch.Generator, ...] = ()


def record(gpu: Gpu, blank: Blank, call: Callable[[], Any]) -> Any:
    """Capture ``call``; what it returned, at captured addresses.

    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for what torch and CUDA refuse; the pool's handle must then
    not be used for another capture. What is no ``Exception`` (an interrupt, a skip) and our own errors come through
    as they are.
    """
    watched = _Watched(call)
    try:
        outputs = _capture(gpu, blank, watched)
        if blank.keeps:
            blank.graph.instantiate()
        gpu.synchronize()
        return outputs
    except BaseException as raised:
        recover(gpu, blank)
        _translate(gpu, watched.error or raised, call)


def _capture(gpu: Gpu, blank: Blank, call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        # A graph without a node does nothing: torch warns of it, here it is refused in torch's words.
        warnings.filterwarnings("error", message=_EMPTY_GRAPH)
        with gpu.capturing(blank.graph, generators=blank.generators, pool=blank.handle):
            try:
                outputs = call()
                gpu.check_stayed()
                return outputs
            except BaseException:
                # A capture cut short may well be empty; that must not become the error.
                warnings.filterwarnings("ignore", message=_EMPTY_GRAPH)
                raise


def _translate(gpu: Gpu, error: BaseException, call: Callable[[], Any]) -> NoReturn:
    if isinstance(error, CudagraphError) or not isinstance(error, Exception):
        raise error
    with gpu.cuda.stream(gpu.current_stream()):  # the call may leave another one current
        diagnosis = diagnose(call, gpu.current_stream) if is_unspecific(error) else None
    raise refusal_of(error, diagnosis) from error

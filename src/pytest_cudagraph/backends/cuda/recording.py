"""One capture: begin, run the model once, end, and come out clean whichever of them fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

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


def record(gpu: Gpu, graph: Any, handle: Any, call: Callable[[], Any], *, instantiate: bool) -> Any:
    """Capture ``call`` into ``graph``, with the memory of the pool ``handle``; what it returned, at captured addresses.

    ``instantiate`` for a graph made with ``keep_graph``, which torch would otherwise leave to the first launch.
    Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for what torch and CUDA refuse. What is no
    ``Exception`` (an interrupt, a skip) and our own errors come through as they are.
    """
    watched, has_ended = _Watched(call), False
    try:
        outputs = _capture(gpu, graph, handle, watched)
        has_ended = True
        if instantiate:
            graph.instantiate()
        gpu.synchronize()
        return outputs
    except BaseException as raised:
        # Where the model's own error comes out, the context manager has ended the capture without one of its own.
        recover(gpu, graph, handle, has_ended=has_ended or raised is watched.error)
        _translate(watched.error or raised, call)


def _capture(gpu: Gpu, graph: Any, handle: Any, call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        # A graph without a node does nothing: torch warns of it, here it is refused in torch's words.
        warnings.filterwarnings("error", message=_EMPTY_GRAPH)
        with gpu.capturing(graph, pool=handle):
            try:
                return call()
            except BaseException:
                # A capture cut short may well be empty; that must not become the error.
                warnings.filterwarnings("ignore", message=_EMPTY_GRAPH)
                raise


def _translate(error: BaseException, call: Callable[[], Any]) -> NoReturn:
    if isinstance(error, CudagraphError) or not isinstance(error, Exception):
        raise error
    raise refusal_of(error, diagnose(call) if is_unspecific(error) else None) from error

"""The runner: one call after the other, through a graph where one fits."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import autocast_dtype, is_capturing
from pytest_cudagraph.device import choose
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.graph_set import GraphSet
from pytest_cudagraph.serving.row_analysis import Setup
from pytest_cudagraph.serving.rows import CallForm, Cut, NoCut
from pytest_cudagraph.serving.statistics import EagerReason, RunnerStatistics, Tally

_InferenceMode = torch._C._InferenceMode  # what torch.inference_mode enters, without a microsecond of Python
_is_any_autocast = torch._C._is_any_autocast_enabled


class GraphRunner:
    """Serves calls of ``model`` from captured graphs, from any number of threads.

    A call is padded to the next captured batch size and its outputs are cut back; what no graph fits runs eager, and
    the reason is counted. Example::

        with GraphRunner(model, tokens, kwargs={"mask": mask}, batch_sizes=(1, 2, 4, 8)) as run:
            logits = run(tokens[:3], mask=mask[:3])
            print("\\n".join(run.statistics.lines()))

    ``model`` is captured for each of ``batch_sizes``, from example arguments; ``kwargs`` are those with a keyword.
    ``batch_dim`` is an int, or a tree of ints and None for tensors without rows. ``max_graphs`` bounds the graphs
    kept at a time. ``capture="lazy"`` captures a batch size with its first call. Without ``clone_outputs``, outputs
    are the graph's own buffers, which the next call overwrites. With ``strict``, a refused capture raises
    :class:`~pytest_cudagraph.errors.CaptureRefusal` instead of running eager. With ``check_rows``, a model whose rows
    depend on each other is never padded. ``backend`` replaces ``device``: the
    seam for tests and for other kinds of devices. Raises :class:`~pytest_cudagraph.errors.InputError` for what
    cannot be used, :class:`~pytest_cudagraph.errors.DeviceUnavailable`, and what the model raises.
    """

    def __init__(
        self,
        model: Model,
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        batch_dim: Any = 0,
        device: str = "auto",
        max_graphs: int | None = None,
        capture: Literal["now", "lazy"] = "now",
        clone_outputs: bool = True,
        strict: bool = False,
        check_rows: bool = True,
        backend: Backend | None = None,
    ) -> None:
        flags = {"clone_outputs": clone_outputs, "strict": strict, "check_rows": check_rows}
        _check_options(model, kwargs, max_graphs, capture, flags)
        example = Example(args=example_inputs, kwargs=dict(kwargs or {}))
        self._sizes = _checked_sizes(example, batch_sizes, batch_dim)
        self._size_for = [self._sizes[bisect_left(self._sizes, rows)] for rows in range(self._sizes[-1] + 1)]
        self._backend = backend or _open_backend(device, example)
        inputs.check_device(example, self._backend.device)
        self._model, self._clones = model, clone_outputs
        self._form = CallForm(example, batch_dim)
        self._device_type = torch.device(self._backend.device).type
        self._autocast = autocast_dtype(self._device_type)
        self._tally, self._lock, self._launched = Tally(), threading.RLock(), None
        setup = Setup(
            model=model,
            example=inputs.clone(example),
            batch_dim=batch_dim,
            backend=self._backend,
            max_graphs=max_graphs,
            strict=strict,
            check_rows=check_rows,
        )
        self._graphs = GraphSet(setup, self._tally)
        self._is_open = True
        if capture == "now":
            self._capture_now()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that have, or may have, a graph; ascending."""
        return self._sizes

    @property
    def device(self) -> str:
        """``cuda:0`` or ``cpu``."""
        return self._backend.device

    @property
    def statistics(self) -> RunnerStatistics:
        """What was served until now; also after :meth:`close`."""
        with self._lock:
            tally, cut = self._tally, self._graphs.cut
            return RunnerStatistics(
                device=self.device,
                hits=tally.replays.total() - tally.padded,
                padded=tally.padded,
                padding_rows=tally.padding_rows,
                eager={reason.value: count for reason, count in tally.eager.items()},
                replays=dict(tally.replays),
                memory_bytes=self._graphs.memory_bytes,
                refused={size: str(error) for size, error in self._graphs.refused.items()},
                not_padded=cut.why if isinstance(cut, NoCut) else "",
                captures=tally.captures,
                recaptures=tally.recaptures,
                evictions=tally.evictions,
                state_changes=tally.state_changes,
                capture_ns=tally.capture_ns,
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``model(*args, **kwargs)`` returns, in inference mode.

        Does not wait for the device. Inside of a capture it is the model's own call, and not counted. Raises
        :class:`~pytest_cudagraph.errors.CudagraphError` once the runner is closed, and what the model raises.
        """
        if is_capturing():
            self._check_open()
            return self._model(*args, **kwargs)
        with self._lock:
            self._check_open()
            # Eager and replay alike: a caller must not find inference tensors here and ordinary ones there.
            with _InferenceMode(True):
                # Another thread may launch on a stream of its own: without this, its copy-in could overtake a replay.
                self._launched = self._backend.order_after(self._launched)
                return self._serve(args, kwargs)

    def recapture(self) -> None:
        """Capture all graphs again, after a change that no call can see: an attribute, a hook, a global."""
        with self._lock:
            self._check_open()
            self._autocast = autocast_dtype(self._device_type)  # what is captured now bakes it in
            self._graphs.recapture()

    def close(self) -> None:
        """Release all graphs; calls raise from then on. A second close does nothing."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._graphs.close()

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise CudagraphError("this GraphRunner is closed and has released its graphs; make another one")

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, rows = self._form.read(args, kwargs, self._sizes[-1])
        if (_is_any_autocast() or self._autocast) and autocast_dtype(self._device_type) != self._autocast:
            rows = EagerReason.OTHER_AUTOCAST
        if isinstance(rows, EagerReason):
            return self._eager(rows, args, kwargs)
        size = self._size_for[rows]
        graph, tally = self._graphs.at(size), self._tally
        if graph is None:
            return self._eager(EagerReason.REFUSED, args, kwargs)
        if rows == size:
            output = graph(*args, **kwargs)
        else:
            cut = self._graphs.cut
            if not isinstance(cut, Cut):
                return self._eager(_why_not_padded(cut), args, kwargs)
            output = cut(self._form.replay_padded(graph, values, size), rows)
            tally.padded += 1
            tally.padding_rows += size - rows
        tally.replays[size] += 1
        return self._own(output) if self._clones else output

    def _eager(self, reason: EagerReason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._backend.running():
            output = self._model(*args, **kwargs)
        self._tally.eager[reason] += 1
        return output

    def _own(self, output: Any) -> Any:
        # The next replay overwrites the graph's buffers; a copy is in order of this thread's stream, inside the lock.
        return output.clone() if type(output) is torch.Tensor else pytree.map_tensors(torch.clone, output)

    def _capture_now(self) -> None:
        try:
            with self._lock:
                self._graphs.capture(self._sizes)
        except BaseException:
            self.close()
            raise


def _why_not_padded(cut: NoCut | None) -> EagerReason:
    return EagerReason.NOT_PADDED if cut is None else cut.reason


def _check_options(model: Model, kwargs: Any, max_graphs: int | None, capture: str, flags: Mapping[str, Any]) -> None:
    if not callable(model):
        raise InputError(f"the model must be callable; found {type(model).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs is a mapping of keyword arguments; found {type(kwargs).__name__}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} is True or False; found {flag!r}")
    if capture not in ("now", "lazy"):
        raise InputError(f"capture is 'now' or 'lazy'; found {capture!r}")
    if max_graphs is not None and (type(max_graphs) is not int or max_graphs < 1):
        raise InputError(f"max_graphs is a positive int, or None for one graph per batch size; found {max_graphs!r}")


def _checked_sizes(example: Example, batch_sizes: Sequence[int], batch_dim: Any) -> tuple[int, ...]:
    """Ascending, after everything has been tried that a later capture would ask for."""
    inputs.batch_examples(example.args, example.kwargs, batch_sizes, batch_dim)
    return tuple(sorted(batch_sizes))


def _open_backend(option: str, example: Example) -> Backend:
    kind = choose(option).kind
    given = pytree.tensors_in((example.args, example.kwargs))[0].device
    on_its_gpu = torch.cuda.device(given) if kind == given.type == "cuda" else nullcontext()
    with on_its_gpu:
        return open_backend(kind)

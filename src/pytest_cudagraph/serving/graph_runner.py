"""The runner: serves each call from a captured graph, or eager if no graph fits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import autocast_dtype, is_capturing
from pytest_cudagraph.child_process import begin_in_forked_child
from pytest_cudagraph.device import choose, describe
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.serving.calls import note_served
from pytest_cudagraph.serving.graph_set import FormGraphs, GraphSet, WatchMode, check_max_graphs
from pytest_cudagraph.serving.row_analysis import RunnerSetup
from pytest_cudagraph.serving.rows import Cut
from pytest_cudagraph.serving.statistics import NoGraphReason, RunnerStatistics, Tally
from pytest_cudagraph.serving.tuned_file import fingerprint, graph_sizes

_InferenceMode = torch._C._InferenceMode  # what torch.inference_mode enters, without a microsecond of Python
_is_any_autocast = torch._C._is_any_autocast_enabled


class GraphRunner:
    """Serves calls of ``model`` from captured graphs, from any number of threads.

    A call is padded to the next captured batch size, and its outputs are cut back. A call that fits no graph runs
    eager, and the reason is counted. Example::

        with GraphRunner(model, tokens, kwargs={"mask": mask}, batch_sizes=(1, 2, 4, 8)) as run:
            logits = run(tokens[:3], mask=mask[:3])
            print("\\n".join(run.statistics.lines()))

    ``model`` is captured for each of ``batch_sizes`` (1, 2, 4, 8), from example arguments; ``kwargs`` are by name.
    ``batch_dim`` is an int, or a tree of ints and None for tensors without rows. An example without any rows
    (``batch_dim=None``, no arguments) has one graph, for calls of its form. ``max_graphs`` limits the graphs at a time.
    ``capture="lazy"`` captures a batch size in its first call. Without ``clone_outputs``, outputs are the graph's own
    buffers, which the next call overwrites. With ``strict``, a refused capture raises
    :class:`~pytest_cudagraph.errors.CaptureRefusal` instead of running eager, and so does a call that would capture
    again because the model has changed. Each call looks at every weight, 0.25 µs each. With ``watch="hooks"`` it takes
    0.2 µs for all: torch is wrapped to tell of replacements, and some are seen up to 10 ms late (docs/runner.md). With
    ``watch="manual"`` only :meth:`renew_if_changed` looks. With ``check_rows``, a model whose rows depend on each other
    is never padded. By default calls are padded unless a pad row would change the model's state, with ``pad=True`` also
    then, and with ``pad=False`` never. ``backend`` replaces ``device``, for tests and other kinds of devices. Raises
    :class:`~pytest_cudagraph.errors.InputError` for unusable arguments,
    :class:`~pytest_cudagraph.errors.DeviceUnavailable`, and what the model raises.
    """

    def __init__(
        self,
        model: Model,
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
        device: str = "auto",
        max_graphs: int | None = None,
        capture: Literal["now", "lazy"] = "now",
        clone_outputs: bool = True,
        strict: bool = False,
        check_rows: bool = True,
        pad: bool | None = None,
        watch: WatchMode = "call",
        backend: Backend | None = None,
    ) -> None:
        _check_model(model, kwargs)
        _check_choice((True, False), clone_outputs=clone_outputs, strict=strict, check_rows=check_rows)
        _check_choice((True, False, None), pad=pad)
        _check_choice(("now", "lazy"), capture=capture)
        _check_choice(("call", "hooks", "manual"), watch=watch)
        check_max_graphs(max_graphs)
        if backend is not None and not isinstance(backend, Backend):
            raise InputError(f"backend is a Backend, or None for that of the device; found {value_text(backend)}")
        example = Example(args=example_inputs, kwargs=dict(kwargs or {}))
        self._backend = open_backend_for(device, example) if backend is None else backend
        self._model, self._clones, self._is_open = model, clone_outputs, True
        self._check_rows, self._pad, self._captures_now = check_rows, pad, capture == "now"
        self._device_type = torch.device(self._backend.device).type
        self._autocast = autocast_dtype(self._device_type)
        self._tally, self._lock, self._launched = Tally(), threading.RLock(), None
        begin_in_forked_child(self, renew_lock)
        self._graphs = GraphSet(
            model, self._backend, max_graphs=max_graphs, strict=strict, watch=watch, tally=self._tally
        )
        try:
            self._last = self._add(example, batch_sizes, batch_dim)
        except BaseException:
            self._graphs.close()
            raise

    @classmethod
    def tuned(
        cls, path: str | Path, model: Model, *example_inputs: Any, name: str | None = None, **options: Any
    ) -> GraphRunner:
        """A runner for the batch sizes at which a graph was the best in a file of ``TuningReport.save``.

        ``name`` is the entry's, by default the model's class; ``options`` are those of :class:`GraphRunner`. Raises
        :class:`~pytest_cudagraph.errors.InputError` if the file has no such entry for this device and model, or if a
        graph of the model itself is not the best.
        """
        example = Example(args=example_inputs, kwargs=dict(options.get("kwargs") or {}))
        backend = options.pop("backend", None) or open_backend_for(options.get("device", "auto"), example)
        kept_name, device = name or type(model).__name__, describe(backend.kind)
        sizes = graph_sizes(Path(path), kept_name, device, fingerprint(model))
        return cls(model, *example_inputs, batch_sizes=sizes, backend=backend, **options)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes of the runner's own example, ascending."""
        return self._graphs.forms[0].sizes

    @property
    def device(self) -> str:
        """``cuda:0`` or ``cpu``."""
        return self._backend.device

    @property
    def statistics(self) -> RunnerStatistics:
        """All calls until now; also after :meth:`close`."""
        with self._lock:
            forms = tuple(form.statistics() for form in self._graphs.forms)
            counters = asdict(self._tally)
            counters["eager"] = {reason.value: count for reason, count in self._tally.eager.items()}
            replays = sum(count for form in forms for count in form.replays.values())
            return RunnerStatistics(device=self.device, hits=replays - self._tally.padded, forms=forms, **counters)

    def also(
        self,
        *example_inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        batch_sizes: Sequence[int] | None = None,
        batch_dim: Any = 0,
    ) -> None:
        """Serve calls of another form too, such as a prefill chunk beside decode steps.

        The form differs from the earlier ones in its nesting, a plain argument, a dtype, or a shape apart from the
        rows. All forms share the memory, the lock, the limit of graphs and the statistics. Raises
        :class:`~pytest_cudagraph.errors.InputError` for unusable arguments and for a form that an earlier one overlaps,
        and what the constructor raises. Then the form is not added.
        """
        _check_kwargs(kwargs)
        example = Example(args=example_inputs, kwargs=dict(kwargs or {}))
        with self._lock:
            self._check_open()
            self._add(example, batch_sizes, batch_dim)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``model(*args, **kwargs)``, in inference mode.

        Does not wait for the device. A call within a capture runs the model itself and is not counted. Raises
        :class:`~pytest_cudagraph.errors.CudagraphError` after :meth:`close`, and what the model raises.
        """
        if is_capturing():
            self._check_open()
            return self._model(*args, **kwargs)
        with self._lock:
            self._check_open()
            # For eager and replay, so that outputs are always inference tensors.
            with _InferenceMode(True):
                # Another thread may use another stream, and its copy-in must not overtake the last replay.
                self._launched = self._backend.order_after(self._launched)
                return self._serve(args, kwargs)

    def renew_if_changed(self) -> bool:
        """Drop all graphs if the model has changed since their capture. Returns whether it has.

        The next calls capture again. For a runner with ``watch="manual"``: call it before the first call of each
        request, for example. Raises :class:`~pytest_cudagraph.errors.CaptureRefusal` for a changed model if ``strict``.
        """
        with self._lock:
            self._check_open()
            return self._graphs.renew_if_changed()

    def recapture(self) -> None:
        """Capture all graphs again, after a change that is not detected: an attribute, a hook, a global."""
        with self._lock:
            self._check_open()
            self._autocast = autocast_dtype(self._device_type)  # the new graphs contain it
            self._graphs.recapture()

    def close(self) -> None:
        """Release all graphs; later calls raise. A second close does nothing."""
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

    def _add(self, example: Example, batch_sizes: Sequence[int] | None, batch_dim: Any) -> FormGraphs:
        if batch_sizes is None:
            batch_sizes = (1,) if inputs.example_batch_size(example, batch_dim) is None else (1, 2, 4, 8)
        inputs.batch_examples(example, batch_sizes, batch_dim)  # so that no later capture fails at that
        inputs.check_device(example, self._backend.device)
        setup = RunnerSetup(
            model=self._model, example=inputs.clone(example), batch_dim=batch_dim, backend=self._backend,
            check_rows=self._check_rows, pad=self._pad,
        )  # fmt: skip
        form = FormGraphs(setup, batch_sizes)
        with self._lock:
            self._graphs.add(form, capture=self._captures_now)
        return form

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = self._last  # at most one form fits, and often that of the last call
        values, rows = form.read(args, kwargs)
        if isinstance(rows, NoGraphReason):
            form, values, rows = self._graphs.find(args, kwargs)
            self._last = form
        if (_is_any_autocast() or self._autocast) and autocast_dtype(self._device_type) != self._autocast:
            rows = NoGraphReason.OTHER_AUTOCAST
        if isinstance(rows, NoGraphReason):
            return self._eager(rows, args, kwargs)
        size = form.size_for[rows]
        if rows != size and self._pad is False:
            return self._eager(NoGraphReason.PADDING_OFF, args, kwargs)
        graph, tally = self._graphs.at(form, size), self._tally
        if graph is None:
            return self._eager(NoGraphReason.REFUSED, args, kwargs)
        if rows == size:
            output = graph.replay_leaves(values)
        else:
            cut = form.cut
            if not isinstance(cut, Cut):
                return self._eager(NoGraphReason.NOT_PADDED if cut is None else cut.reason, args, kwargs)
            output = cut(graph.replay_leaves(form.call.padded(values, size)), rows)
            tally.padded += 1
            tally.padding_rows += size - rows
        form.replays[size] += 1
        note_served("graph")
        return self._own(output) if self._clones else output

    def _eager(self, reason: NoGraphReason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._backend.running():
            output = self._model(*args, **kwargs)
        self._tally.eager[reason] += 1
        note_served("eager", reason.value)
        return output

    def _own(self, output: Any) -> Any:
        # The next replay overwrites the buffers. Inside the lock, the copy precedes it on this stream.
        return output.clone() if type(output) is torch.Tensor else pytree.map_tensors(torch.clone, output)


def renew_lock(owner: Any) -> None:
    """In a forked child: another thread of the parent may have held the lock, and does not exist here."""
    owner._lock = threading.RLock()


def open_backend_for(device: str, example: Example) -> Backend:
    """The backend of a device option, on the GPU of the example inputs.

    Raises :class:`~pytest_cudagraph.errors.DeviceUnavailable`, and :class:`~pytest_cudagraph.errors.InputError` for
    inputs on another device.
    """
    kind = choose(device).kind
    tensors = pytree.tensors_in((example.args, example.kwargs))
    on_gpu = kind == "cuda" and bool(tensors) and tensors[0].device.type == "cuda"
    with torch.cuda.device(tensors[0].device) if on_gpu else nullcontext():
        backend = open_backend(kind)
    inputs.check_device(example, backend.device)
    return backend


def _check_model(model: Model, kwargs: Any) -> None:
    if not callable(model):
        raise InputError(f"the model must be callable; found {type(model).__name__}")
    _check_kwargs(kwargs)


def _check_choice(allowed: Sequence[Any], **options: Any) -> None:
    for name, value in options.items():
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            *others, last = map(repr, allowed)
            raise InputError(f"{name} is {', '.join(others)} or {last}; found {value_text(value)}")


def _check_kwargs(kwargs: Any) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs is a mapping of keyword arguments; found {type(kwargs).__name__}")
    if not all(isinstance(name, str) for name in kwargs or ()):
        raise InputError(f"the names of kwargs are strings; found {value_text(list(kwargs or ()))}")

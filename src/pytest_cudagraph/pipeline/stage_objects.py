"""What the stage fixtures give to a test: compiled code and graphs, which belong to a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_cudagraph import inputs
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.pipeline.model_run import ModelRun
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.settings.case import Case
from pytest_cudagraph.values import Receipt


class CompiledModel:
    """A model compiled for each batch size; calling it picks the one for the inputs' batch size."""

    def __init__(self, case: Case, model_run: ModelRun | None, eager: Model, batch_dim: Any) -> None:
        self.case, self.model_run, self.eager, self._batch_dim = case, model_run, eager, batch_dim

    def for_batch(self, batch_size: int) -> Model:
        """The callable compiled for one batch size; without ``--cudagraph`` the model itself."""
        __tracebackhide__ = True
        return self.model_run.call_for(batch_size) if self.model_run else self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            batch_size = inputs.example_batch_size(inputs.Example(args=args, kwargs=kwargs), self._batch_dim)
            compiled = self.for_batch(self.case.batch_sizes[0] if batch_size is None else batch_size)
        except InputError as mistake:
            raise mistake.with_traceback(None) from None
        return compiled(*args, **kwargs)


class Graphs(Mapping[int, Callable[..., Any]]):
    """One callable per batch size that copies its inputs in and replays; without ``--cudagraph`` the eager model.

    Outputs live in the graph's own memory: the next replay overwrites them.
    """

    def __init__(self, case: Case, model_run: ModelRun | None, eager: Model) -> None:
        self.case, self.model_run = case, model_run
        self._eager = {} if model_run else dict.fromkeys(case.batch_sizes, eager)

    @property
    def receipts(self) -> Mapping[int, Receipt]:
        """Per batch size what was captured; empty without ``--cudagraph``."""
        results = self.model_run.results if self.model_run else None
        receipts = {size: results.receipt_of(size) for size in results.graphs} if results else {}
        return {size: receipt for size, receipt in receipts.items() if receipt is not None}

    def __getitem__(self, batch_size: int) -> Callable[..., Any]:
        __tracebackhide__ = True
        try:
            return self._all[batch_size]
        except KeyError:
            raise KeyError(f"no batch size {batch_size}; there are {list(self)}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._all))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def _all(self) -> Mapping[int, Callable[..., Any]]:
        __tracebackhide__ = True
        return self.open_run().results.graphs if self.model_run else self._eager

    def open_run(self) -> ModelRun:
        """The run that these graphs belong to.

        Raises :class:`~pytest_cudagraph.errors.InputError` after the test that captured them: their memory is
        released then.
        """
        __tracebackhide__ = True
        if self.model_run is None or self.model_run.results.is_closed:
            raise InputError("these graphs ended with the test that captured them; capture them again in this one")
        return self.model_run

"""The graphs of one form of calls: an example of the arguments at several batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.protocols import CapturedGraph
from pytest_cudagraph.serving.row_analysis import RunnerSetup
from pytest_cudagraph.serving.rows import CallForm, Cut, NoCut
from pytest_cudagraph.serving.statistics import FormStatistics, NoGraphReason


class FormGraphs:
    """The graphs of one form by batch size, and what their captures have shown."""

    def __init__(self, setup: RunnerSetup, batch_sizes: Sequence[int]) -> None:
        self.setup, self.sizes = setup, tuple(sorted(batch_sizes))
        self.size_for = [self.sizes[bisect_left(self.sizes, rows)] for rows in range(self.sizes[-1] + 1)]
        self.call = CallForm(setup.example, setup.batch_dim)
        self.open: dict[int, CapturedGraph] = {}
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self.captured_before: set[int] = set()
        self.replays: Counter[int] = Counter()
        self.refused: dict[int, Exception] = {}
        self.cut: Cut | NoCut | None = None
        self.written: tuple[str, ...] | None = None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], int | NoGraphReason]:
        """The leaves of a call with its number of rows, or with the reason why no graph of this form fits."""
        return self.call.read(args, kwargs, self.sizes[-1])

    def refuse_overlap(self, other: FormGraphs) -> None:
        """Raise :class:`InputError` if a call could fit both forms."""
        shapes = self.call.shared_shapes(self.sizes[-1], other.call, other.sizes[-1])
        if shapes is not None:
            found = ", ".join(map(str, shapes)) or "of no tensors"
            raise InputError(
                "each form must differ from the others in its nesting, its plain arguments, a dtype, or a shape apart "
                f"from the rows; found {self.call.text}\n"
                f"  a call with shapes {found} also fits the form {other.call.text}\n"
                "  to fix: give all batch sizes of one form together"
            )

    def forget(self) -> None:
        """Drop the graphs and what was learned from them. The memory that they read is kept until :meth:`release`."""
        self.open.clear()
        self.refused.clear()
        self.cut = self.written = None

    def statistics(self) -> FormStatistics:
        """The calls of this form until now."""
        return FormStatistics(
            form=self.call.text,
            replays=dict(self.replays),
            memory_bytes={size: graph.receipt.memory_bytes for size, graph in self.open.items()},
            refused={size: str(error) for size, error in self.refused.items()},
            not_padded=self.cut.why if isinstance(self.cut, NoCut) else "",
        )

"""What holds for all models of one compiler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudagraph import inputs
from pytest_cudagraph.errors import InputError

_DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked when made: raises :class:`~pytest_cudagraph.errors.InputError` for a value that cannot be."""

    graphs: bool
    batch_sizes: Sequence[int]
    device: str
    max_graphs: int | None
    compile_timeout_s: float

    def __post_init__(self) -> None:
        inputs.check_sizes(self.batch_sizes)
        if self.device not in _DEVICES:
            raise InputError(f"device is one of {', '.join(_DEVICES)}; found {self.device!r}")
        if self.max_graphs is not None and (type(self.max_graphs) is not int or self.max_graphs < 1):
            raise InputError(
                f"max_graphs is a positive int, or None for one graph per batch size; found {self.max_graphs!r}"
            )
        limit_s = self.compile_timeout_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
            raise InputError(f"compile_timeout_s is a positive number of seconds; found {limit_s!r}")

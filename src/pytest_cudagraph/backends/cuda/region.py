"""Compiled code whose executions are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CountedRegion:
    """Calls compiled code and counts: eager calls and calls while capturing alike, since both launch its kernels.

    A replay launches the captured kernels without this call, so replays are not counted here.
    """

    def __init__(self, call: Callable[..., Any], label: str) -> None:
        self._call = call
        self.label = label
        self._executions = 0

    @property
    def executions(self) -> int:
        """Calls that returned; one that raised has not run."""
        return self._executions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        self._executions += 1
        return result

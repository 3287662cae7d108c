"""The first reason why a capture cannot be; everything after it is CUDA's echo."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from pytest_cudagraph import hazards, sources
from pytest_cudagraph.errors import CaptureRefusal


class Refusals:
    """The verdict on one capture while it is recorded: a refusal stays, also when the model swallows it."""

    def __init__(self) -> None:
        self.first: CaptureRefusal | None = None
        self._thread = threading.get_ident()
        self._deaf = 0

    @property
    def listening(self) -> bool:
        """Whether what happens now is the model's doing: on the recording thread, outside the recorder itself."""
        return not self._deaf and threading.get_ident() == self._thread

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """While the recorder works, its own reads of tensors are no reason to refuse."""
        self._deaf += 1
        try:
            yield
        finally:
            self._deaf -= 1

    def refuse(self, text: str, *, hazard: str, operation: str) -> NoReturn:
        """Raise the reason; any later one is CUDA's complaint about the first."""
        if self.first is None:
            self.first = CaptureRefusal(text, hazard=hazard, operation=operation, site=sources.user_site())
            raise self.first
        self.check()
        raise self.first

    def check(self) -> None:
        """Raise what CUDA says of every operation that follows a refused one."""
        if self.first is not None:
            raise CaptureRefusal(
                hazards.CAPTURE_INVALIDATED.text, hazard=self.first.hazard, operation=self.first.operation
            ) from self.first

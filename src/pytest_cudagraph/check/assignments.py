"""The lines that set attributes of modules during a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from pytest_cudagraph import state
from pytest_cudagraph.backends.capture_mode import replaced
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.sources import Sites, user_sites
from pytest_cudagraph.values import Assigned


class Assignments:
    """Notes for each attribute of the model's modules the line that set it last in a call."""

    def __init__(self, model: Model) -> None:
        self._owners: dict[str, list[int]] = {}
        for outer in state.modules_of(model):
            for path, module in outer.named_modules():
                self._owners.setdefault(path, []).append(id(module))
        self._sites: dict[tuple[int, str], Sites] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the assignments inside. This costs more than a call of a small model."""
        with replaced([(nn.Module, "__setattr__", self._noting)]):
            yield

    def located(self, assigned: Assigned) -> Assigned:
        """The same with its line. Its name is that of the state: ``layer.cached`` or ``layer.cached[0]``."""
        return replace(assigned, **self._sites_of(assigned.name)._asdict())

    def _sites_of(self, name: str) -> Sites:
        path, _, attribute = name.partition("[")[0].rpartition(".")
        keys = ((owner, attribute) for owner in self._owners.get(path, ()))
        return next((self._sites[key] for key in keys if key in self._sites), Sites())

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def assign(module: nn.Module, name: str, value: Any) -> None:
            self._sites[id(module), name] = user_sites()
            original(module, name, value)

        return assign

"""What own graphs add to pytest: the method ``own`` of the fixture ``cudagraph``. Every run imports this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cudagraph.errors import GraphTestFailure


def pytest_cudagraph_methods() -> Mapping[str, Callable[..., Any]]:
    from pytest_cudagraph.own_graphs.fixture import own

    return {"own": own}


def pytest_cudagraph_failures() -> Mapping[str, type[GraphTestFailure]]:
    from pytest_cudagraph.own_graphs.result import GATE, OwnGraphsFailed

    return {GATE: OwnGraphsFailed}

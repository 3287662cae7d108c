"""What decoding adds to pytest: the fixtures ``decode_engine`` and ``engine_modes``.

Every pytest run imports this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.fixtures import MakeDecodeEngine
    from pytest_cudagraph.decoding.modes.fixtures import CompareModes


@pytest.fixture
def decode_engine(request: pytest.FixtureRequest) -> Iterator[MakeDecodeEngine]:
    """Generate tokens by captured decode steps, and gate tokens, steps and speed."""
    from pytest_cudagraph.decoding.fixtures import MakeDecodeEngine
    from pytest_cudagraph.session.context import FixtureContext

    with ExitStack() as resources:
        yield MakeDecodeEngine(FixtureContext(request, resources), resources)


@pytest.fixture
def engine_modes(request: pytest.FixtureRequest) -> Iterator[CompareModes]:
    """Compare an engine's eager mode with its graphs: errors, tokens, use of graphs, memory and speed."""
    from pytest_cudagraph.decoding.modes.fixtures import CompareModes
    from pytest_cudagraph.session.context import FixtureContext

    with ExitStack() as resources:
        yield CompareModes(FixtureContext(request, resources))

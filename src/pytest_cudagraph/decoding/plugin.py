"""What decoding adds to pytest: the fixtures ``decode_engine`` and ``engine_modes``, and the mark ``decode``.

Every pytest run imports this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from pytest_cudagraph.decoding.mark import DECODE

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.fixtures import MakeDecodeEngine
    from pytest_cudagraph.decoding.modes.fixtures import CompareModes
    from pytest_cudagraph.errors import GraphTestFailure
    from pytest_cudagraph.settings.registered import FeatureMark


def pytest_cudagraph_marks() -> Sequence[FeatureMark]:
    return (DECODE,)


def pytest_cudagraph_failures() -> Mapping[str, type[GraphTestFailure]]:
    from pytest_cudagraph.decoding.errors import FAILURES

    return FAILURES


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

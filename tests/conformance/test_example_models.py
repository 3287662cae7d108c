"""The examples' models pass every stage; each of four bugs planted in them is caught, by its id and at its line."""

from __future__ import annotations

import pytest
from tests.conformance.example_models import EXAMPLES
from tests.conformance.planted import PLANTED, assert_caught, assert_clean, planted
from tests.conformance.stages import run

from pytest_cudagraph.backends import open_backend

pytestmark = pytest.mark.filterwarnings("default")

PLANTED_IN_EVERY_RUN = {"cnn", "transformer of 2 layers", "custom stages"}
"""The others are built of the same layers, or of the architectures' (``test_architectures.py``)."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_audit_capture_and_check_at_every_batch_size(name, kind):
    if "llama" in name:
        pytest.importorskip("transformers")
    example = EXAMPLES[name]
    found = run(planted("example", example.build), open_backend(kind), example.batch_sizes)
    assert_clean(found)
    assert found.notes <= {"mutates-state"}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLANTED_IN_EVERY_RUN else pytest.mark.nightly) for name in EXAMPLES]
)
def test_a_planted_bug_is_caught(name, bug, kind):
    example = EXAMPLES[name]
    found = run(planted("example", example.build, bug), open_backend(kind), example.batch_sizes[:2])
    assert_caught(found, bug)

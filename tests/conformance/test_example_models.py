"""The examples' models pass every stage; each of four bugs planted in them is caught, by its id and at its line."""

from __future__ import annotations

import pytest
from tests.conformance.example_models import EXAMPLES
from tests.conformance.planted import PLANTED, assert_caught, assert_clean, planted
from tests.conformance.stages import run

from pytest_cudagraph.backends import open_backend

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * ("llama" in name)) for name in EXAMPLES])
def example(request):
    if "llama" in request.param:
        pytest.importorskip("transformers")
    return EXAMPLES[request.param]


def test_an_example_passes_audit_capture_and_check_at_every_batch_size(example, kind):
    found = run(planted("example", example.build), open_backend(kind), example.batch_sizes)
    assert_clean(found)
    assert found.notes <= {"mutates-state"}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(example, bug, kind):
    found = run(planted("example", example.build, bug), open_backend(kind), example.batch_sizes[:2])
    assert_caught(found, bug)

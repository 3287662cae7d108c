"""Real architectures pass every stage; each of four bugs planted in them is caught, by its id and at its line."""

from __future__ import annotations

import pytest
from tests.conformance.architectures import ARCHITECTURES, Architecture, padded
from tests.conformance.planted import PLANTED, assert_caught, assert_clean, planted
from tests.conformance.stages import run

from pytest_cudagraph.backends import open_backend

AT_EVERY_SIZE = {"bert", "gpt2", "llama", "mixtral", "resnet", "t5"}
"""One of each kind: encoder, decoder, decoder with a cache, experts, convolutions, encoder with decoder."""

PLANTED_IN_EVERY_RUN = {"llama", "resnet", "t5"}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers")


def case_of(architecture, bug=None):
    return planted(architecture.model, architecture.build, bug)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_passes_audit_capture_and_check_at_its_batch_sizes(name, kind):
    sizes = (1, 2, 4, 8) if name in AT_EVERY_SIZE else (1, 8)
    found = run(case_of(ARCHITECTURES[name]), open_backend(kind), sizes)
    assert_clean(found)
    assert found.notes == set()


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in PLANTED_IN_EVERY_RUN else pytest.mark.nightly) for name in ARCHITECTURES],
)
def test_a_planted_bug_is_caught(name, bug, kind):
    found = run(case_of(ARCHITECTURES[name], bug), open_backend(kind), (1, 2))
    assert_caught(found, bug)


def test_a_list_that_indexes_a_tensor_deep_in_a_library_is_found_at_its_line(kind):
    """Falcon takes a tensor apart with ``qkv[..., [-2], :]``: each such list is copied to the device."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = run(case_of(Architecture("FalconForCausalLM", "FalconConfig", sizes, padded)), open_backend(kind))
    (error,) = found.audit.errors
    assert error.id == "host-data"
    assert error.site.file.endswith("modeling_falcon.py")
    assert found.refusal.site == error.site


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_cache_that_sends_a_number_to_the_device_is_found_at_its_line(name, kind):
    """The layers of a sliding window make a tensor of the window's size, and move it to the device of the keys."""
    architecture = ARCHITECTURES[name]
    cached = architecture._replace(sizes={**architecture.sizes, "use_cache": True})
    found = run(case_of(cached), open_backend(kind))
    (error,) = found.audit.errors
    assert error.id == "host-data"
    assert error.site.file.endswith("cache_utils.py")
    # A number on the CPU is already on the twin's device: only CUDA refuses the copy.
    assert kind == "cpu" or found.refusal.site == error.site

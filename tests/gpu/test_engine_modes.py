"""An engine eagerly and with CUDA graphs, each in a process of its own."""

from __future__ import annotations

import pytest
from examples.test_engine_modes import make_llama

from pytest_cudagraph import transformers_engine
from pytest_cudagraph.decoding.modes.engines import LoadRequest
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, run_mode


def refuses_capture():
    """A model that reads a value of the device in each step."""
    model = make_llama()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden) * (1.0 + 0.0 * hidden.sum().item())
    return model


def run(factory, *, graphs):
    load = LoadRequest(graphs=graphs, rows=2, device="cuda:0", threads=1)
    request = ModeRequest(
        engine=transformers_engine(factory, max_length=32), load=load, arguments={}, prompts=[[5, 17, 42], [7, 7, 21]],
        count=6, generations=2,
    )  # fmt: skip
    return run_mode(request, 120)


def test_both_modes_give_the_same_tokens_and_graphs_count_their_replays():
    pytest.importorskip("transformers")
    eager, graphs = (run(make_llama, graphs=each) for each in (False, True))
    assert (eager.mode.failure, graphs.mode.failure) == (None, None)
    tokens = [[[row.tokens for row in generation] for generation in each.generations] for each in (eager, graphs)]
    assert tokens[0] == tokens[1]
    assert (eager.mode.receipt.replays, graphs.mode.receipt.replays, graphs.mode.receipt.steps) == (0, 10, 10)
    assert graphs.mode.capture_ns > 0


def test_a_refused_capture_is_an_error_of_the_load_with_graphs():
    pytest.importorskip("transformers")
    failure = run(refuses_capture, graphs=True).mode.failure
    assert (failure.stage, failure.is_raised) == ("load", True)
    assert failure.error.startswith("CaptureRefusal: ")
    assert "test_engine_modes.py:" in failure.error

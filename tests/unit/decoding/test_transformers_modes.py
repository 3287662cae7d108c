"""A model of transformers as an engine: eager and graphs give the same tokens, and the graphs tell their replays."""

from __future__ import annotations

import pytest

from pytest_cudagraph import CaptureRefusal, InputError, LoadRequest, transformers_engine
from pytest_cudagraph.decoding.results import GenerationReceipt

pytest.importorskip("transformers", reason="the engine runs models of transformers")
FACTORY = "examples.test_engine_modes:make_llama"
PROMPTS = [[5, 17, 42], [7, 7, 21]]


def load(factory=FACTORY, *, graphs=True, **arguments):
    request = LoadRequest(graphs=graphs, rows=2, device="cpu", threads=1)
    return transformers_engine(factory, max_length=16).load(request, **arguments)


def refuses_capture():
    from examples.test_engine_modes import make_llama

    model = make_llama()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden) * (1.0 + 0.0 * hidden.sum().item())
    return model


def test_both_modes_give_the_same_tokens_also_of_random_weights():
    eager, graphs = load(graphs=False), load(graphs=True)
    found = [list(each.generate(PROMPTS, 6)) for each in (eager, graphs)]
    assert found[0] == found[1]
    assert [set(step) for step in found[0]] == [{0, 1}] * 6
    assert eager.facts().receipt == GenerationReceipt(steps=5, replays=0, eager={"the eager mode": 5})
    assert graphs.facts().receipt == GenerationReceipt(steps=5, replays=5)
    assert (eager.facts().capture_ns, graphs.facts().capture_ns > 0) == (None, True)
    graphs.close()


def test_a_refused_capture_is_raised_by_the_load_with_graphs_only():
    load(refuses_capture, graphs=False)
    with pytest.raises(CaptureRefusal):
        load(refuses_capture)


def test_what_the_engine_cannot_run_is_an_input_error():
    with pytest.raises(InputError, match="takes arguments with batching='continuous' only; found enforce_eager"):
        load(enforce_eager=True)
    with pytest.raises(InputError, match="transformers_engine takes prompts of one length"):
        list(load(graphs=False).generate([[1, 2], [3]], 4))
    with pytest.raises(InputError, match="the decoder holds 16 tokens"):
        list(load(graphs=False).generate(PROMPTS, 40))
    assert transformers_engine(FACTORY, max_length=16).name == "transformers make_llama"

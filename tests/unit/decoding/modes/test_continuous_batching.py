"""Transformers' continuous batching, run for real. On a CPU it turns its graphs off, and the engine says so."""

from __future__ import annotations

import psutil
import pytest

from pytest_cudagraph import InputError, transformers_engine
from pytest_cudagraph.decoding.modes.engines import LoadRequest
from pytest_cudagraph.decoding.results import GenerationReceipt

pytest.importorskip("transformers.generation.continuous_batching", reason="this transformers has no such batching")
FACTORY = "examples.test_engine_modes:make_llama"
PROMPTS = [[5, 17, 42], [7], [9, 8, 7, 6, 5]]
OFF = "transformers turned its graphs off"


@pytest.fixture
def load():
    loaded = []

    def load(*, batching="continuous", rows=3, graphs=True, **arguments):
        request = LoadRequest(graphs=graphs, rows=rows, device="cpu", threads=1)
        engine = transformers_engine(FACTORY, max_length=32, batching=batching)
        loaded.append(engine.load(request, **arguments))
        return loaded[-1]

    yield load
    for each in loaded:
        each.close()


def tokens_of(engine, prompts=PROMPTS, count=6):
    rows = [[] for _ in prompts]
    for step in engine.generate(prompts, count):
        for row, tokens in step.items():
            rows[row] += tokens
    return rows


def test_its_tokens_are_those_of_the_static_cache(load):
    found = tokens_of(load())
    assert found == [tokens_of(load(batching="static", graphs=False, rows=1), [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(("graphs", "why"), [(True, OFF), (False, "the eager mode")])
def test_each_decode_step_is_counted(load, graphs, why):
    engine = load(graphs=graphs)
    assert engine.facts().receipt is None
    assert tokens_of(engine) == tokens_of(engine)
    # One step prefills all prompts, and five decode, in each of two generations.
    assert engine.facts().receipt == GenerationReceipt(steps=10, replays=0, eager={why: 10})
    assert engine.facts().capture_ns is None


def test_its_memory_is_bounded_by_the_rows(load):
    before = psutil.Process().memory_info().rss
    tokens_of(load())
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_arguments_are_those_of_its_configuration(load):
    with pytest.raises(TypeError, match="enforce_eager"):
        load(enforce_eager=True)
    assert load(page_size=8, num_blocks=24).facts().receipt is None


def test_an_error_of_its_loop_is_that_of_each_request(load):
    engine = load()
    engine._manager.batch_processor.model_runner.compute_batch = lambda *args: 1 / 0
    errors = {row: str(error) for step in engine.generate(PROMPTS, 6) for row, error in step.items()}
    assert errors == dict.fromkeys(range(3), "division by zero")


def test_another_batching_is_refused():
    with pytest.raises(InputError, match='batching is "static" or "continuous"; found \'dynamic\''):
        transformers_engine(FACTORY, max_length=32, batching="dynamic")

"""Guided decoding: every token is allowed by the grammar's mask, and every finished output is JSON of the schema."""

import pytest
from small_decoder import SmallDecoder

from pytest_cudagraph import choice, json_schema

pytest.importorskip("xgrammar", reason="guided decoding needs the extra: pip install 'pytest-cudagraph[guided]'")
pytest.importorskip("jsonschema", reason="guided decoding needs the extra: pip install 'pytest-cudagraph[guided]'")

# All bytes, a few pieces of JSON, and the stop token. A model's own tokenizer of transformers does as well.
TOKENS = [*(bytes([each]) for each in range(256)), b'{"', b'"}', b'": ', b"</s>"]
STOP = len(TOKENS) - 1

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["answer", "confidence"],
    "additionalProperties": False,
}


@pytest.fixture
def engine(decode_engine):
    """The logits are of more tokens than the tokenizer has, as in many models."""
    return decode_engine(SmallDecoder(vocabulary=288).eval().to(decode_engine.device))


@pytest.mark.decode(prompt_lengths=[8], output_lengths=[40], batch_sizes=[4])
def test_json(engine):
    found = engine.guided(json_schema(SCHEMA), TOKENS, stop_token=STOP)
    assert found is None or found.valid == 4


@pytest.mark.decode(prompt_lengths=[8], output_lengths=[8], batch_sizes=[2])
def test_choice(engine):
    ways = ["left", "right", "straight on"]
    found = engine.guided(choice(ways), TOKENS, stop_token=STOP)
    # A cut output is the beginning of a way.
    assert found is None or all(any(way.startswith(each.text) for way in ways) for each in found.outputs)

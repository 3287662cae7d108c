"""Each fault in guided generation is found by its own gate and by no other, and what is right passes."""

from __future__ import annotations

import random
import sys

import pytest
import torch

pytest.importorskip("xgrammar", reason="guided generation needs the extra guided")
pytest.importorskip("jsonschema", reason="guided generation needs the extra guided")

from tests.fake_clock import FakeClock
from tests.guided_faults import FAULTS, PERSON, STOP, VOCABULARY, WORDS, Fault

from pytest_cudagraph import choice, json_schema, python_source, regex
from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.decoding.guided import GuidedEngine, RepeatedGuidedSteps
from pytest_cudagraph.decoding.token_masks import GrammarCache, RowMasks, unpacked
from pytest_cudagraph.errors import InputError


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_gate_and_no_other(name):
    expected, found = FAULTS[name].missed, FAULTS[name].found("cpu")
    assert found.keys() == expected.keys(), found
    assert all(text in found[gate] for gate, text in expected.items()), found


def test_the_report_counts_both_graphs_and_judges_every_output():
    found = Fault(graph_sizes=(4,)).report("cpu").scenario
    steps = found.choices.steps
    assert found.choices.replays == steps == found.receipt.replays + 1 == found.receipt.steps + 1
    assert found.receipt.padded_rows == 1
    assert (found.completed, found.valid, found.cut) == (3, 3, 0)
    assert {each.text[:9] for each in found.outputs} == {'{"name": '}
    assert found.tokens.compared == 3 * steps


def test_the_texts_of_python_source_compile():
    grammar = GrammarCache().compiled(python_source(), WORDS, VOCABULARY, STOP)
    draws, texts = random.Random(0), set()
    for _ in range(30):
        texts.add(drawn(grammar, draws, least=draws.randrange(60)))
    assert len(texts) == 30
    assert [text for text in texts if grammar.grammar.problem(text)] == []
    assert grammar.grammar.problem(b"if = 3\n").startswith("SyntaxError: ")


def drawn(grammar, draws, least):
    """A text of random allowed tokens, which ends at the first chance after the least length."""
    masks, text = RowMasks(grammar, 1), []
    while not text or text[-1] != STOP:
        masks.fill()
        allowed = unpacked(masks.packed, VOCABULARY)[0].nonzero().flatten().tolist()
        text.append(STOP if STOP in allowed and len(text) >= least else draws.choice([*{*allowed} - {STOP}]))
        masks.accept(text[-1:])
    return b"".join(WORDS[token] for token in text[:-1])


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (b'{"name": "Ada", "age": 36}', ""),
        (b'{"name": "Ada", "age": 7}', "ValidationError: 7 is less than the minimum of 10"),
        (b'{"name": "Ada", "name": "Alan", "age": 36}', "ValueError: an object has the same key twice"),
        (b'{"name": "A\tda", "age": 36}', "JSONDecodeError: Invalid control character"),
        (b'{"name": "Ada", "age": NaN}', "ValueError: NaN is not JSON"),
        (b'{"name": "Ada", "age": 3', "JSONDecodeError: "),
        (b"\xff", "UnicodeDecodeError: "),
    ],
)
def test_the_parser_of_json_is_strict(output, problem):
    found = json_schema(PERSON).problem(output)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_grammar_is_compiled_once_for_a_tokenizer():
    cache = GrammarCache()
    one, again, other = (cache.compiled(regex("ab*"), words, VOCABULARY, STOP) for words in (WORDS, WORDS, [*WORDS]))
    assert one.words is again.words
    assert one.words is not other.words
    for _ in range(9):
        cache.compiled(regex("a"), [*WORDS], VOCABULARY, STOP)
    assert len(cache._compilers) == 4


def test_a_tokenizer_of_transformers_gives_its_words_and_its_stop_token():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    pieces = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "▁yes": 258, "no": 259}
    model = tokenizers.models.BPE(vocab=pieces, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.ByteFallback()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fault = Fault(tokenizer=tokenizer, stop_token=None, grammar=lambda: choice([" yes", "no"]))
    assert fault.found("cpu") == {}
    assert {each.text for each in fault.report("cpu").scenario.outputs} <= {" yes", "no"}
    tokenizer.eos_token = None
    assert "an output ends with a stop token" in fault.found("cpu")["input"]


@pytest.mark.parametrize(
    ("missing", "use"),
    [
        ("xgrammar", lambda: GrammarCache().compiled(regex("a"), WORDS, VOCABULARY, STOP)),
        ("jsonschema", lambda: json_schema(PERSON)),
    ],
)
def test_without_the_extra_the_error_names_it(monkeypatch, missing, use):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"needs xgrammar and jsonschema: pip install 'pytest-cudagraph\[guided\]'"):
        use()


def test_samples_start_at_one_position_and_count_the_masks_alone():
    torch.manual_seed(0)
    decoder = Fault().decoder(vocabulary=VOCABULARY).eval()
    clock = FakeClock()
    with DecodeEngine(decoder, [2]) as engine, engine.running():
        grammar = GrammarCache().compiled(json_schema(PERSON), WORDS, VOCABULARY, STOP)
        steps = RepeatedGuidedSteps(GuidedEngine(engine, grammar, 2), torch.arange(6).repeat(2, 1), 30, clock)
        start = decoder.position[:2].clone()
        masks = []
        for arm in (steps.arms().eager, steps.arms().replay, steps.arms().replay):
            arm()
            masks.append(steps._masks.packed.clone())
            assert decoder.position[:2].tolist() == (start + steps.steps).tolist()
            steps.rewind()
            assert torch.equal(decoder.position[:2], start)
    assert steps.steps == 8
    assert torch.equal(masks[1], masks[2])
    assert len(steps.rows_masks_ns) == 2 * 8

"""The engine: graphs of one cache give eager's tokens, and every step that is no replay is counted."""

from __future__ import annotations

import pytest
import torch
from examples.small_decoder import SmallDecoder

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.decoding.decoder import check_decoder
from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.decoding.transformers_decoder import static_decoder
from pytest_cudagraph.errors import InputError

CPU = open_backend("cpu")


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return SmallDecoder().eval()


def prompts(rows, count, vocabulary=96):
    return torch.randint(0, vocabulary, (rows, count), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_every_step_replays_and_gives_eagers_tokens_with_a_prompt_in_chunks_of_any_size(decoder, chunk):
    with DecodeEngine(decoder, [1, 4]) as engine:
        for rows in (1, 4):
            eager = engine.generate(prompts(rows, 7), 20, chunk=chunk, graphs=False)
            found = engine.generate(prompts(rows, 7), 20, chunk=chunk)
            assert torch.equal(found.tokens, eager.tokens)
            assert (found.receipt.steps, found.receipt.replays, found.receipt.padded_rows) == (19, 19, 0)
            assert found.receipt.eager == {}
            assert found.tokens.unique().numel() > 4


def test_a_smaller_batch_is_padded_to_the_next_graph(decoder):
    with DecodeEngine(decoder, [1, 4]) as engine:
        eager, found = (engine.generate(prompts(3, 5), 9, graphs=graphs) for graphs in (False, True))
    assert torch.equal(found.tokens, eager.tokens)
    assert (found.receipt.replays, found.receipt.padded_rows, eager.receipt.replays) == (8, 1, 0)


def test_a_batch_beyond_the_largest_graph_runs_eagerly_and_is_counted(decoder):
    with DecodeEngine(decoder, [1, 2]) as engine:
        found = engine.generate(prompts(3, 5), 4)
    assert found.receipt.replays == 0
    assert found.receipt.eager == {"batch 3 is beyond the largest graph (2)": 3}


def test_graphs_of_several_widths_work_on_one_cache(decoder):
    eager = SmallDecoder().eval()
    eager.load_state_dict(decoder.state_dict())
    tokens = prompts(2, 30)
    with DecodeEngine(decoder, [2]) as engine, torch.inference_mode():
        engine.capture(2, 5)
        engine.prefill(tokens[:, :8], chunk=8)
        eager(tokens[:, :8])
        for start, end in ((8, 13), (13, 14), (14, 19), (19, 20)):
            found = engine.step(tokens[:, start:end])
            assert torch.equal(found.logits, eager(tokens[:, start:end]))
            if end == 19:
                decoder.rewind(2), eager.rewind(2)
        assert (engine.graph(2, 5).replays, engine.graph(2, 1).replays) == (2, 2)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        # Its own static cache counts tokens in a Python number, and the prompt is longer than the window.
        ("Mistral", {"sliding_window": 8}),
    ],
)
def test_a_model_of_transformers_generates_as_its_own_generate_does(family, settings):
    transformers = pytest.importorskip("transformers", reason="the adapter is for transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.ndim > 1 else None
    with DecodeEngine(static_decoder(model, 40), [2]) as engine, torch.inference_mode():
        for length in (12, 3):
            expected = model.generate(prompts(2, length), max_new_tokens=20, do_sample=False)[:, length:]
            found = engine.generate(prompts(2, length), 20)
            assert torch.equal(found.tokens, expected)
            assert found.receipt.replays == 19


@pytest.fixture(scope="module")
def t5():
    transformers = pytest.importorskip("transformers", reason="the adapter is for transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=2, num_heads=4, eos_token_id=None
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.ndim > 1 else None
    return model


def test_a_decoder_with_cross_attention_attends_to_the_encoder_states_that_it_was_given_last(t5):
    states, tokens = [torch.randn(2, 7, 32) for _ in range(2)], []
    with torch.inference_mode():
        decoder = static_decoder(t5, 40, encoder_states=states[0])
        with DecodeEngine(decoder, [2]) as engine:
            for given in states:
                decoder.attend_to(given)
                text = prompts(2, 3)
                for _ in range(12):  # without a cache
                    logits = t5(decoder_input_ids=text, encoder_outputs=(given,), use_cache=False).logits
                    text = torch.cat((text, logits[:, -1:].argmax(-1)), 1)
                found = engine.generate(prompts(2, 3), 12)
                assert torch.equal(found.tokens, text[:, 3:])
                assert found.receipt.replays == 11
                tokens.append(found.tokens)
    assert not torch.equal(*tokens)


def test_encoder_states_of_another_kind_are_one_clear_error(t5):
    with pytest.raises(
        InputError, match=r"needs encoder_states, a tensor \(rows, source length, width\); found None: mod"
    ):
        static_decoder(t5, 40)
    decoder = static_decoder(t5, 40, encoder_states=torch.zeros(2, 7, 32))
    with pytest.raises(InputError, match=r"of one shape, \(2, 7, 32\); found \(2, 8, 32\)"):
        decoder.attend_to(torch.zeros(2, 8, 32))
    with pytest.raises(InputError, match="encoder_states has 2 rows; the decoder was called with 4"):
        check_decoder(decoder, CPU, 4)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (SmallDecoder, "found the class SmallDecoder: make an object of it"),
        (torch.nn.Linear(2, 2), "found Linear, which lacks reset, rewind"),
    ],
)
def test_what_is_no_decoder_is_one_clear_error(decoder, message):
    with pytest.raises(InputError, match=message):
        check_decoder(decoder, CPU, 2)


def test_prompts_that_are_no_tensor_are_one_clear_error(decoder):
    with DecodeEngine(decoder, [1]) as engine, pytest.raises(InputError, match=r"found \[\[1, 2\]\]"):
        engine.generate([[1, 2]], 6)


def test_a_call_as_long_as_the_cache_is_captured_and_a_longer_one_is_refused(decoder):
    with DecodeEngine(decoder, [1]) as engine:
        assert engine.capture(1, 64).kernels
        with pytest.raises(InputError, match="the decoder holds 64 tokens; found a call of 65"):
            engine.capture(1, 65)


def test_a_decoder_on_another_device_is_refused_before_its_first_call(monkeypatch):
    monkeypatch.setattr(CPU, "device", "meta")
    with pytest.raises(InputError, match=r"must be on meta, the device of this run; .* is float32 .* on cpu: make the"):
        check_decoder(SmallDecoder(), CPU, 1)


def test_the_error_of_a_decoder_with_fewer_rows_says_where_the_rows_come_from():
    with pytest.raises(RuntimeError) as raised:
        check_decoder(SmallDecoder(rows=2), CPU, 3)
    assert raised.value.__notes__ == [
        "cudagraph: the decoder was called with 3 rows of 2 tokens: batch_sizes= gives the rows"
    ]


def test_without_transformers_the_adapter_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'pytest-cudagraph\[generation\]'"):
        static_decoder(torch.nn.Linear(2, 2), 8)

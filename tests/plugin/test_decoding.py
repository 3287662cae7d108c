"""The ``decode_engine`` fixture: what passes is measured and saved, what fails names its gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.plugin.conftest import failure_of

EXAMPLES = Path(__file__).parents[2] / "examples"

GOOD = """
import pytest, torch
from pytest_cudagraph import InputError
from small_decoder import SmallDecoder

torch.manual_seed(0)

@pytest.mark.decode(min_speedup=0.01, prompt_lengths=[4, 12], output_lengths=[6], batch_sizes=[2])
def test_speech(decode_engine):
    found = decode_engine(SmallDecoder().eval()).greedy()
    assert [(each.prompt_length, each.receipt.replays) for each in found] in ([], [(4, 5), (12, 5)])
    assert not found or found[1].bytes.activations_bytes == 3 * found[0].bytes.activations_bytes

@pytest.mark.decode(min_speedup=0.01, batch_sizes=[1])
def test_given_prompts_and_padding(decode_engine):
    engine = decode_engine(SmallDecoder().eval(), graph_sizes=[4])
    found = engine.greedy(torch.tensor([[1, 2, 3], [4, 5, 6]]), output_lengths=[4], exact=True)
    assert [each.receipt.padded_rows for each in found] in ([], [2])
    with pytest.raises(InputError, match="output_lengths takes distinct whole numbers of tokens of at least 2"):
        engine.greedy(output_lengths=[1], name="one")
    if found:
        with pytest.raises(InputError, match="graph_sizes takes distinct whole numbers of at least 1"):
            decode_engine(SmallDecoder().eval(), graph_sizes=[0]).greedy(name="none")
    with pytest.raises(InputError, match="prompts are int64 token ids"):
        engine.greedy(torch.zeros(1, 3), name="floats")
    with pytest.raises(InputError, match="holds 64 tokens; a prompt of 60 and 32 new ones need 91"):
        engine.greedy(prompt_lengths=[4, 60], name="long")
"""

PREFILL = """
import pytest, torch
from pytest_cudagraph import InputError, TooManyBytes
from small_decoder import SmallDecoder

def test_chunks(decode_engine):
    engine = decode_engine(SmallDecoder(last_only=True).eval())
    found = engine.prefill(48, chunk=8, max_bytes_ratio=0.6)
    assert found.largest_difference < 1e-5 and 0.1 < found.bytes_ratio < 0.6
    with pytest.raises(InputError, match="chunk is a number of tokens"):
        engine.prefill(48, chunk=0, name="none")

def test_lookup(decode_engine):
    engine = decode_engine(SmallDecoder().eval())
    prompts = torch.arange(4).repeat(2, 3)
    found = engine.prompt_lookup(prompts, k=2, ngram=(1, 3), output_length=12, min_tokens_per_step=1, atol=1e-4)
    assert found is None or found.receipt.replays == found.receipt.steps
    with pytest.raises(InputError, match="k is a number of proposed tokens"):
        engine.prompt_lookup(prompts, k=0, name="none")

def test_too_few_tokens_per_step(decode_engine):
    prompts = torch.arange(4).repeat(2, 3)
    decode_engine(SmallDecoder().eval()).prompt_lookup(prompts, k=2, min_tokens_per_step=3, atol=1e-4)

def test_too_many_bytes(decode_engine):
    decode_engine(SmallDecoder().eval()).prefill(48, chunk=8, max_bytes_ratio=0.1)
"""

GUIDED = """
import pytest, torch
from pytest_cudagraph import InputError, choice, ebnf, json_schema, regex
from small_decoder import SmallDecoder

torch.manual_seed(0)
TOKENS = [*(bytes([each]) for each in range(95)), b"</s>"]

def guided(decode_engine, grammar, **rest):
    engine = decode_engine(SmallDecoder().eval())
    return engine.guided(grammar, TOKENS, stop_token=95, output_length=12, **rest)

@pytest.mark.decode(prompt_lengths=[4], batch_sizes=[2])
def test_choice(decode_engine):
    found = guided(decode_engine, choice(["YES", "NO"]))
    assert found is None or found.valid_ratio == 1 and found.times.mask_ns > 0

def test_prompts(decode_engine):
    found = guided(decode_engine, regex("[A-C]{3}"), prompts=torch.ones(2, 3, dtype=torch.int64), max_overhead=1000)
    assert found is None or [len(each.text) for each in found.outputs] == [3, 3]
    with pytest.raises(InputError, match="guided takes a grammar of"):
        guided(decode_engine, "[A-C]", name="text")

def test_ignored(decode_engine):
    def choose(logits, mask):
        return logits.argmax(-1, keepdim=True)
    guided(decode_engine, regex("[A-C]{3}"), choose=choose)

def test_invalid(decode_engine):
    def refuse(text):
        raise ValueError("no text is right")
    guided(decode_engine, ebnf('root ::= "A"', refuse))

def test_written_by_pointer(decode_engine):
    def choose(logits, mask):
        import xgrammar
        logits = logits.clone()
        xgrammar.apply_token_bitmask_inplace(logits, mask)
        return logits.argmax(-1, keepdim=True)
    guided(decode_engine, regex("[A-C]{3}"), choose=choose)
"""

FAULTS = """
import pytest, torch
from small_decoder import SmallDecoder

torch.manual_seed(0)

class PositionInPython(SmallDecoder):
    at = 0
    def forward(self, tokens):
        self.position.fill_(self.at)
        self.at += tokens.shape[1]
        return super().forward(tokens)
    def reset(self):
        self.at = 0
    def rewind(self, count):
        self.at -= count

class ReadsTheHost(SmallDecoder):
    def forward(self, tokens):
        assert self.position.max().item() < self.length
        return super().forward(tokens)

class ReplacesItsCache(SmallDecoder):
    def reset(self):
        super().reset()
        self.layers[0].keys = torch.zeros_like(self.layers[0].keys)

class Raises(SmallDecoder):
    def forward(self, tokens):
        raise ValueError("no such token")

@pytest.mark.parametrize("decoder", [PositionInPython, ReadsTheHost, ReplacesItsCache, Raises])
def test_fault(decode_engine, decoder):
    decode_engine(decoder().eval()).greedy(batch_sizes=[2])
"""

SLOWER = """
import pytest
from pytest_cudagraph.measure import PerfCounterClock
from small_decoder import SmallDecoder

class Time:
    now_ns = 0

def tick(clock):
    Time.now_ns += 1_000_000
    return Time.now_ns

class Prefills(SmallDecoder):
    def forward(self, tokens):
        Time.now_ns += PREFILL_NS * (tokens.shape[1] > 1)
        return super().forward(tokens)

@pytest.mark.decode(min_speedup=0.01, prompt_lengths=[4], output_lengths=[6], batch_sizes=[2], max_slowdown=0.1)
def test_speech(decode_engine, monkeypatch):
    for reading in ("now_ns", "cpu_time_ns"):
        monkeypatch.setattr(PerfCounterClock, reading, tick)
    decode_engine(Prefills().eval()).greedy()
"""


@pytest.fixture
def decoding(project):
    (project.path / "small_decoder.py").write_text((EXAMPLES / "small_decoder.py").read_text())
    return project


def test_generations_are_gated_shown_and_saved_each_under_its_lengths(decoding):
    decoding.pytester.makepyfile(test_user=GOOD)
    result = decoding.measure("--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "generation * batch *TTFT *ITL * tokens/s  replays  padded  ties", "*5/5 * 0 * 0",
            "prompt lengths *batch  prompt * TTFT  activations *cache *weights", "* 4 * KiB *", "* 12 * KiB *",
        ]
    )  # fmt: skip
    entries = {each["name"].partition("[")[2] for each in json.loads(decoding.baseline.read_text())["benchmarks"]}
    assert any("prompt12-output6" in name for name in entries)
    run = json.loads((decoding.path / "run.json").read_text())
    first = run["tests"][0]["batches"][0]
    assert first["scenario"]["result"]["tokens"] == {
        "compared": 12, "same_shapes": True, "ties": 0, "largest_difference": None, "tolerance": None,
    }  # fmt: skip
    assert {each["gate"]: each["verdict"] for each in first["judgements"]} == dict.fromkeys(
        ("steps", "tokens", "structure", "speedup", "baseline"), "passed"
    )


def test_a_prefill_and_a_prompt_lookup_are_gated_shown_and_never_saved(decoding):
    decoding.pytester.makepyfile(test_user=PREFILL)
    result = decoding.measure("--cudagraph-update")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["E *TooManyBytes: batch 1: chunks of 8 take 0.* of the bytes of one call *", "prefill *", "prompt lookup *"]
    )
    result.stdout.no_fnmatch_line("not written:*")
    assert not list(decoding.path.glob(".cudagraph/*.json"))
    assert "TooFewTokensPerStep: batch 2: " in result.stdout.str()
    decoding.run().assert_outcomes(passed=4)


def test_a_guided_generation_is_gated_shown_and_never_saved(decoding):
    pytest.importorskip("xgrammar", reason="guided generation needs the extra guided")
    decoding.pytester.makepyfile(test_user=GUIDED)
    result = decoding.measure("--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "E *TokenNotAllowed: batch *: every token must be allowed by the mask of its step; row 0, token 0 is *",
            "E *InvalidOutput: batch *: 0 of * completed outputs valid; this test asks for 100%",
            "E *row 0: ValueError: no text is right: 'A'",
            "E *CaptureFailed: * changed, and no torch operation wrote it*",
            "guided * batch * grammar  valid  cut  mask/row  share * overhead  replays  ties",
            "* choice *2/2 *",
        ]
    )
    result.stdout.no_fnmatch_line("not written:*")
    assert not list(decoding.path.glob(".cudagraph/*.json"))
    run = json.loads((decoding.path / "run.json").read_text())
    gates = [each["gate"] for each in run["tests"][1]["batches"][0]["judgements"]]
    assert gates == ["steps", "steps", "mask", "tokens", "validity", "overhead"]
    decoding.run().assert_outcomes(passed=5)


def test_a_slower_prefill_fails_by_the_figures_that_it_moved_and_an_update_accepts_it(decoding):
    for prefill_ms in (20, 60):
        decoding.pytester.makepyfile(test_user=SLOWER.replace("PREFILL_NS", f"{prefill_ms}_000_000"))
        result = decoding.measure("--cudagraph-update")
        result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["accepted: *prompt4-output6], batch 2: TTFT 21.0 -> 61.0 ms (+190 %), time", "  per token *"]
    )
    (last,) = json.loads(decoding.baseline.read_text())["benchmarks"][1]["extra_info"]["cudagraph"]["sessions"][1:]
    assert last["figures"]["ttft"] == {"median": 0.061, "q1": 0.061}
    decoding.pytester.makepyfile(test_user=SLOWER.replace("PREFILL_NS", "90_000_000"))
    result = decoding.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *SlowerThanBaseline: batch 2: TTFT is 49 % slower than the baseline *(median 61.0 -> 91.0 ms)*"]
    )
    result.stdout.no_fnmatch_line("*ITL is * slower*")


def test_without_the_flag_each_decoder_generates_once_and_nothing_is_judged(decoding):
    decoding.pytester.makepyfile(test_user=GOOD)
    result = decoding.run()
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*tokens/s*")


def test_a_faulty_decoder_fails_with_the_gate_that_found_it(decoding, golden):
    decoding.pytester.makepyfile(test_user=FAULTS)
    result = decoding.measure()
    result.assert_outcomes(failed=4)
    assert "src/pytest_cudagraph" not in result.stdout.str()
    golden("plugin/decoding-faults.txt", failure_of(result))

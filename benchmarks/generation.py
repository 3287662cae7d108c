"""Decoding with captured steps: speed of a step, tokens per step of prompt lookup, what masks cost, long prompts.

    python benchmarks/generation.py

The decoder is that of ``examples/small_decoder.py``. Bytes are counted on ``meta`` for the shape of Llama 3.1 8B, with
all of its 32 layers. Exits 1 if a generation differs from eager, if a step is no replay, or if a limit of bytes is
exceeded.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.small_decoder import SmallDecoder

from pytest_cudagraph import DecodeEngine, PerfCounterClock, json_schema, measure_arms, regex, static_decoder
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.agreement import compare_logits, compare_with_eager
from pytest_cudagraph.decoding.guided import GuidedEngine, RepeatedGuidedSteps, summary
from pytest_cudagraph.decoding.lookup import LookupRequest, LookupRun
from pytest_cudagraph.decoding.prefill import PrefillRequest, compare_prefill
from pytest_cudagraph.decoding.results import TokenAgreement
from pytest_cudagraph.decoding.times import RepeatedSteps, per_step, time_generations
from pytest_cudagraph.decoding.token_masks import GrammarCache, TokenGrammar, first_disallowed
from pytest_cudagraph.measure import Bounds
from pytest_cudagraph.stats import FixedTimeRule
from pytest_cudagraph.units import bytes_text, latency_text
from pytest_cudagraph.values import Timing

LLAMA_8B = {"vocabulary": 128256, "hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336, "layers": 32}
CHUNK = 2048
LIMITS = {"activations": 0.10, "activations+cache": 0.50}
"""Of a chunked prefill of 32768 tokens over one call."""
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string"},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "reasons": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["answer", "confidence", "reasons"],
    "additionalProperties": False,
}
SECOND_NS = 1_000_000_000
CONTEXT = SimpleNamespace(backend=open_backend("cpu"), clock=PerfCounterClock())
"""What a time of whole generations needs of a device."""


def main() -> int:
    torch.set_num_threads(1)
    failures = [*decode_steps(), *prompt_lookup(), *guided(), *long_prompts()]
    transformers_prompt()
    print("\n".join(f"FAILED: {each}" for each in failures) or "all tokens equal, all steps replays, all limits kept")
    return 1 if failures else 0


def decoder() -> SmallDecoder:
    torch.manual_seed(0)
    return SmallDecoder(rows=8, length=512, hidden=128, inner=256).eval()


def prompts(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(7))


def decode_steps() -> list[str]:
    """Eager against the graph: samples of steps from one position."""
    failures = []
    with DecodeEngine(decoder(), [1, 4, 8]) as engine:
        for rows in (1, 4, 8):
            for length in (16, 256):
                given = prompts(rows, length)
                tokens, receipt = compare_with_eager(engine, given, 64, Tolerance())
                if not isinstance(tokens, TokenAgreement) or receipt.replays != receipt.steps:
                    failures.append(f"batch {rows}, prompt {length}: {tokens}, {receipt}")
                times = time_generations(engine, given, 64, CONTEXT, SECOND_NS)
                with torch.inference_mode():
                    timing = timed(RepeatedSteps(engine, given, CONTEXT.backend.kind))
                print(
                    f"decode: batch {rows}, prompt {length}: step {latency_text(timing.eager.median_ns)} eager, "
                    f"{latency_text(timing.replay.median_ns)} by the graph, {timing.speedup.estimate:.2f}x "
                    f"({timing.speedup.low:.2f}-{timing.speedup.high:.2f}), {receipt.replays}/{receipt.steps} replays, "
                    f"TTFT {latency_text(times.ttft.median_ns)}, ITL {latency_text(times.itl.median_ns)}, "
                    f"{times.tokens_per_second:.0f} tokens/s"
                )
    return failures


def timed(steps: RepeatedSteps | RepeatedGuidedSteps) -> Timing:
    timing = measure_arms(
        steps.arms(),
        clock=PerfCounterClock(),
        rule=FixedTimeRule(time_ns=SECOND_NS),
        bounds=Bounds.of_budget(8 * SECOND_NS),
        seed=1,
        prepare=steps.rewind,
    )
    return per_step(timing, steps.steps)


def prompt_lookup() -> list[str]:
    """Tokens per step. With such weights a token depends on the last ones alone, so that the text repeats itself."""
    failures = []
    model = decoder()
    with torch.no_grad():
        for layer in model.layers:
            layer.out.weight.mul_(0.01)
    for k in (1, 3, 7):
        given = prompts(1, 16).repeat(1, 4)
        with DecodeEngine(model, [1]) as engine, torch.inference_mode():
            engine.capture(1, k + 1)
            eager = engine.generate(given, 128, graphs=False, keep_logits=True)
            request = LookupRequest(k=k, ngram=(2, 4), min_tokens_per_step=None)
            run = LookupRun(engine=engine, request=request, prompts=given, expected=eager.tokens, rows=1)
            found = run.run()
        tokens = compare_logits(eager, found, Tolerance(rtol=1e-5))
        if not isinstance(tokens, TokenAgreement) or found.receipt.replays != found.receipt.steps:
            failures.append(f"lookup, k {k}: {tokens}, {found.receipt}")
        drafted, accepted = (sum(getattr(call, what) for call in run.calls) for what in ("drafted", "accepted"))
        print(
            f"lookup: k {k}: {127 / len(run.calls):.2f} tokens per step, {accepted} of {drafted} proposed accepted, "
            f"{found.receipt.replays}/{found.receipt.steps} replays"
        )
    return failures


def guided() -> list[str]:
    """What masks cost, by vocabulary and rows: one row's next mask, the choice under it, and the whole step."""
    if find_spec("xgrammar") is None or find_spec("jsonschema") is None:
        print("guided: not measured: pip install 'pytest-cudagraph[guided]'")
        return []
    failures, cache = [], GrammarCache()
    for vocabulary in (32000, 128256):
        words = vocabulary_of(vocabulary)
        cache.compiled(regex("a"), words, vocabulary, 0)  # the first loads xgrammar
        compiled = partial(cache.compiled, json_schema(SCHEMA), words, vocabulary, vocabulary - 1)
        compile_ns = [timed_call(compiled) for _ in range(3)]
        grammar = compiled()
        print(
            f"guided: vocabulary {vocabulary}: tokenizer and grammar {latency_text(compile_ns[0])}, "
            f"again {latency_text(min(compile_ns[1:]))}"
        )
        for rows in (1, 8):
            failures += guided_rows(grammar, rows)
    return failures


def guided_rows(grammar: TokenGrammar, rows: int) -> list[str]:
    torch.manual_seed(0)
    model = SmallDecoder(rows=rows, length=128, vocabulary=grammar.vocabulary, hidden=128, inner=256).eval()
    given = prompts(rows, 16)
    with DecodeEngine(model, [rows]) as engine:
        guided = GuidedEngine(engine, grammar, rows)
        found = guided.generate(given, 64)
        wrong = first_disallowed(grammar, found.tokens.tolist())
        tokens = compare_with_eager(guided, given, found.steps, Tolerance()).tokens
        with torch.inference_mode():
            steps = RepeatedGuidedSteps(guided, given, found.steps, PerfCounterClock())
            times = summary(timed(steps), steps.rows_masks_ns, rows)
            logits, masks = torch.randn(rows, grammar.vocabulary), guided.masks(rows, rows)
            choice_ns = sorted(timed_call(lambda: guided.choose(logits, masks)) for _ in range(50))[25]
    low, high = times.overhead.low, times.overhead.high
    bounds = f" ({low:.1%} to {high:.1%})" if math.isfinite(high) else ""
    print(
        f"guided: vocabulary {grammar.vocabulary}, batch {rows}: a row's mask {latency_text(times.mask_ns)}, masks "
        f"{times.mask_share:.1%} of a step, the choice {latency_text(choice_ns)}, step "
        f"{latency_text(times.greedy.median_ns)} greedy, {latency_text(times.guided.median_ns)} guided, "
        f"overhead {times.overhead.estimate:.1%}{bounds}"
    )
    is_right = wrong is None and isinstance(tokens, TokenAgreement) and found.choices.replays == found.steps
    return [] if is_right else [f"guided, batch {rows}: {wrong}, {tokens}, {found.receipt}, {found.choices}"]


def vocabulary_of(size: int) -> list[bytes]:
    """All bytes, words of random letters, half of them after a space, and the stop token."""
    draws, words = random.Random(0), {bytes([each]): None for each in range(256)}
    while len(words) < size - 1:
        letters = "".join(draws.choices("etaoinshrdlucmfwypvbgkjqxz", k=draws.randint(2, 8)))
        words[(draws.choice(("", " ")) + letters).encode()] = None
    return [*words, b"</s>"]


def timed_call(call: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - start_ns)


def long_prompts() -> list[str]:
    """Bytes of a prompt in chunks beside one call, on ``meta``."""
    failures = []
    for length in (2048, 4096, 8192, 16384, 32768):
        with torch.device("meta"):
            model = SmallDecoder(rows=1, length=length, last_only=True, **LLAMA_8B).to(torch.bfloat16)
        for counting, limit in LIMITS.items():
            request = PrefillRequest(length=length, chunk=CHUNK, max_bytes_ratio=None, counting=counting)
            found = compare_prefill(model, request, Tolerance())
            whole, chunked = (bytes_text(each.total(counting)) for each in (found.whole, found.chunked))
            print(
                f"bytes: {length} tokens, {counting}: {whole} in one call, {chunked} in chunks: {found.bytes_ratio:.3f}"
            )
            if length == 32768 and found.bytes_ratio > limit:
                failures.append(f"{counting} of chunks are {found.bytes_ratio:.3f} of one call's; the limit is {limit}")
    return failures


def transformers_prompt() -> None:
    """The same of transformers' Llama with two layers: its attention repeats keys and values where it has a mask."""
    if find_spec("transformers") is None:
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    request = PrefillRequest(length=32768, chunk=CHUNK, max_bytes_ratio=None, counting="activations")
    for force in ("0", "1"):
        with patch.dict(os.environ, TRANSFORMERS_SDPA_FORCE_GQA=force):
            found = compare_prefill(static_decoder(model, 32768), request, Tolerance())
        print(f"bytes: 32768 tokens, transformers, TRANSFORMERS_SDPA_FORCE_GQA={force}: {found.bytes_ratio:.4f}")


if __name__ == "__main__":
    sys.exit(main())

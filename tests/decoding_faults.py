"""Faults planted in decoding, each with the one gate that must find it. The twin and CUDA run the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from examples.small_decoder import SmallDecoder

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding import lookup, prefill
from pytest_cudagraph.decoding.agreement import compare_with_eager, judge_steps, judge_tokens
from pytest_cudagraph.decoding.engine import DecodeEngine, Step, call_decoder
from pytest_cudagraph.decoding.lookup import LookupRequest, run_lookup
from pytest_cudagraph.decoding.prefill import PrefillRequest
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.values import Judgement

TOLERANCE = Tolerance(rtol=1e-3, atol=1e-3)
"""A GPU may sum products of float32 in TF32."""


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


class Grows(SmallDecoder):
    def forward(self, tokens):
        self.seen = torch.cat((getattr(self, "seen", tokens[:, :0]), tokens), 1)
        return super().forward(tokens)


class ReplacesItsCache(SmallDecoder):
    def reset(self):
        super().reset()
        for layer in self.layers:
            layer.keys = torch.zeros_like(layer.keys)


class ReplacesItsCacheLater(SmallDecoder):
    """As one that makes a new cache for each request once it serves."""

    serves = False

    def reset(self):
        super().reset()
        if self.serves:
            self.layers[0].keys = torch.zeros_like(self.layers[0].keys)


class DoesNotReset(SmallDecoder):
    def reset(self):
        self.position.clamp_(max=1)


class RewindsTooLittle(SmallDecoder):
    def rewind(self, count):
        super().rewind(count - 1)


class RewindsOneAtMost(SmallDecoder):
    def rewind(self, count):
        super().rewind(min(count, 1))


class OneRowOnly(SmallDecoder):
    def forward(self, tokens):
        return super().forward(tokens)[:1]


class GivesTokens(SmallDecoder):
    def forward(self, tokens):
        return super().forward(tokens).argmax(-1)


class WholeMask(SmallDecoder):
    def forward(self, tokens):
        mask = torch.ones(64, self.length, self.length, device=tokens.device)
        return super().forward(tokens) + 0 * mask[0, 0, 0]


class ForgetsWhatItAppends(SmallDecoder):
    """Its cache keeps no token of some calls: as a decoder that writes to a dummy slot while it is captured."""

    rows_kept = 0

    def forgets(self, tokens):
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # a build without CUDA, outside of a capture
            return False

    def forward(self, tokens):
        caches = [cache for layer in self.layers for cache in (layer.keys, layer.values)]
        before = [cache.clone() for cache in caches]
        logits = super().forward(tokens)
        for cache, old in zip(caches, before, strict=True) if self.forgets(tokens) else ():
            cache[self.rows_kept :] = old[self.rows_kept :]
        return logits


class ForgetsRowsUnderCapture(ForgetsWhatItAppends):
    rows_kept = 2


class ForgetsChunks(ForgetsWhatItAppends):
    def forgets(self, tokens):
        return tokens.shape[1] == 8


class LeaksItsRotaryTable(SmallDecoder):
    """A long text stretches the table, and reset() does not restore it."""

    def forward(self, tokens):
        self.sin.mul_(self.position[0] < 9)
        return super().forward(tokens)


class ScaleOfAllRows(SmallDecoder):
    """As a cache in int8 with one scale for all rows: copies of a row do not move it."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits / logits.detach().amax((0, 1, 2))


class NotFinite(SmallDecoder):
    """Its logits are no numbers from the tenth token on, eagerly and captured."""

    value = float("nan")

    def forward(self, tokens):
        logits = super().forward(tokens)
        return torch.where(self.position[: tokens.shape[0], None, None] > 9, self.value, logits)


class Infinite(NotFinite):
    value = float("inf")


class RulesAllOut(NotFinite):
    value = -float("inf")


class LargerUnderCapture(ForgetsWhatItAppends):
    """As a temperature that only the served path has: the choice of the next token stays."""

    rows_kept = 4

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits * 1.01 if self.forgets(tokens) else logits


class OneOutputBuffer(DoesNotReset):
    """It returns the same memory in each call, and its reset keeps a token."""

    def __init__(self):
        super().__init__()
        self.register_buffer("output", torch.zeros(4 * 64 * 96))

    def forward(self, tokens):
        logits = super().forward(tokens)
        return self.output[: logits.numel()].view(logits.shape).copy_(logits)


class KeepsNoCache(SmallDecoder):
    """As a recurrent model whose adapter drops the state: each call sees its own tokens alone."""

    def forward(self, tokens):
        self.position.zero_()
        return super().forward(tokens)

    def rewind(self, count):
        pass


class LooksAhead(SmallDecoder):
    """Its mask is one step late: in a call of several tokens each attends to the next one too."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return torch.cat((logits[:, :-1] + logits[:, 1:], logits[:, -1:]), 1)


class SharesBlocks(SmallDecoder):
    """The second half of the rows is given the blocks of the first."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        half = tokens.shape[0] // 2
        for layer in self.layers:
            layer.keys[half : 2 * half] = layer.keys[:half]
        return logits


class MixesRows(SmallDecoder):
    """As a normalisation over the batch."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits - logits.mean(0)


class DrawsRandomNumbers(SmallDecoder):
    def forward(self, tokens):
        return torch.nn.functional.dropout(super().forward(tokens), 0.1)


class Counts(SmallDecoder):
    """Its next token is the last one plus 1, modulo 4: a text that repeats."""

    def forward(self, tokens):
        return torch.nn.functional.one_hot((tokens + 1) % 4, 96) + 0.0 * super().forward(tokens)


class EagerOnOneStep(DecodeEngine):
    calls = 0

    def step(self, tokens):
        self.calls += 1
        return call_decoder(self.decoder, tokens) if self.calls == 7 else super().step(tokens)


class FlipsRowThree(DecodeEngine):
    calls = 0

    def step(self, tokens):
        self.calls += 1
        found, logits = super().step(tokens)
        if self.calls == 7:
            found[3] = (found[3] + 1) % 96
        return Step(found, logits)


class NewWeights(DecodeEngine):
    def __init__(self, decoder, batch_sizes):
        super().__init__(decoder, batch_sizes)
        decoder.head.weight = torch.nn.Parameter(-decoder.head.weight)


class Serves(DecodeEngine):
    def __init__(self, decoder, batch_sizes):
        super().__init__(decoder, batch_sizes)
        decoder.serves = True


class NeverRewinds(DecodeEngine):
    def __init__(self, decoder, batch_sizes):
        super().__init__(decoder, batch_sizes)
        decoder.rewind = lambda count: None


def random_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(7))


def generated(fault: Fault, device: str, *, prompts: Any = None, rows=4, graph_sizes=(4,), count=12) -> list[Judgement]:
    prompts = (random_tokens(rows, 6) if prompts is None else prompts).to(device)
    with fault.engine(fault.decoder().eval().to(device), graph_sizes) as engine:
        tokens, receipt = compare_with_eager(engine, prompts, count, TOLERANCE)
    return [judge_steps(receipt), judge_tokens(tokens, exact=True)]


def looked_up(fault: Fault, device: str, *, k=3, least: float | None = None) -> list[Judgement]:
    prompts = torch.arange(4, device=device).repeat(1, 3)
    request = LookupRequest(k=k, ngram=(1, 4), min_tokens_per_step=least)
    settings = GenerationSettings(output_lengths=(25,), exact=True, tolerance=Tolerance(rtol=1e-3, atol=1e-3))
    context = SimpleNamespace(backend=open_backend("cuda" if device == "cuda" else "cpu"))
    with fault.engine(fault.decoder().eval().to(device), [1]) as engine:
        return list(run_lookup(engine, prompts, request, settings, context).judgements)


def prefilled(fault: Fault, device: str, **request: Any) -> list[Judgement]:
    facts = {"length": 48, "chunk": 8, "max_bytes_ratio": 0.6, "counting": "activations"}
    decoder = fault.decoder().eval().to(device)
    asked = PrefillRequest(**facts | request)
    return list(prefill.judge_prefill(prefill.compare_prefill(decoder, asked, TOLERANCE), asked).judgements)


def overlapping(tokens, chunk):
    step = tokens.shape[1] if chunk is None else chunk
    return [tokens[:, max(start - 2, 0) : start + step] for start in range(0, tokens.shape[1], step)]


def one_token_late(tokens, request):
    return [(tokens[-1] + 2 + each) % 4 for each in range(request.k)]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``missed`` maps the gate that finds it to a part of its message. ``input`` is an error before any gate."""

    missed: Mapping[str, str] = field(default_factory=dict)
    run: Callable[..., list[Judgement]] = generated
    decoder: Callable[[], Any] = SmallDecoder
    engine: type[DecodeEngine] = DecodeEngine
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext

    def found(self, device: str) -> dict[str, str]:
        """The gates that are missed, with their messages."""
        torch.manual_seed(0)
        try:
            with self.planted():
                return {each.gate: each.reason for each in self.run(self, device) if each.verdict.fails}
        except InputError as error:
            return {"input": str(error)}


def of_prompts(prompts: Any, message: str, **rest: Any) -> Fault:
    return Fault(run=partial(generated, prompts=prompts, **rest), missed={"input": message})


FAULTS = {
    "none": Fault(),
    "none, padded": Fault(run=partial(generated, rows=3)),
    "none, looked up": Fault(run=partial(looked_up, least=3.9), decoder=Counts),
    "none, in chunks": Fault(run=prefilled),
    "eager on one step": Fault(engine=EagerOnOneStep, missed={"steps": "10 replays in 11 steps"}),
    "batch beyond the largest graph": Fault(
        run=partial(generated, rows=3, graph_sizes=[2]), missed={"steps": "0 replays in 11 steps"}
    ),
    "position in Python": Fault(decoder=PositionInPython, missed={"tokens": "differ from eager's, first in row"}),
    "position in Python, padded": Fault(
        run=partial(generated, rows=3), decoder=PositionInPython, missed={"tokens": "differ from eager's, first in row"}
    ),
    "captured step that never writes the cache": Fault(
        decoder=ForgetsWhatItAppends, missed={"tokens": "differ from eager's, first in row"}
    ),
    "captured step that never writes the cache, padded": Fault(
        run=partial(generated, rows=3), decoder=ForgetsWhatItAppends, missed={"tokens": "differ from eager's, first in"}
    ),
    "captured step that never writes the cache, looked up": Fault(
        run=looked_up, decoder=ForgetsWhatItAppends, missed={"tokens": "differ from eager's, first in row"}
    ),
    "captured step that writes the cache of two rows": Fault(
        decoder=ForgetsRowsUnderCapture, missed={"tokens": "differ from eager's, first in row"}
    ),
    "rotary table that reset() leaves stretched": Fault(
        decoder=LeaksItsRotaryTable, missed={"tokens": "differ from eager's, first in row"}
    ),
    "scale of all rows, padded": Fault(
        run=partial(generated, rows=3), decoder=ScaleOfAllRows,
        missed={"input": "several tokens in one call must give the logits of as many calls"},
    ),
    "logits that are not numbers": Fault(decoder=NotFinite, missed={"finite": "row 0, token 4 has nan"}),
    "logits that are infinite": Fault(decoder=Infinite, missed={"finite": "row 0, token 4 has inf"}),
    "logits that rule every token out": Fault(decoder=RulesAllOut, missed={"finite": "row 0, token 4 has only -inf"}),
    "logits that are not numbers, padded": Fault(
        run=partial(generated, rows=3), decoder=NotFinite, missed={"finite": "row 0, token 4 has nan"}
    ),
    "logits that are not numbers, looked up": Fault(
        run=looked_up, decoder=NotFinite, missed={"finite": "row 0, token 0 has nan"}
    ),
    "logits that are not numbers, in chunks": Fault(
        run=prefilled, decoder=NotFinite, missed={"finite": "the last token of one call has nan"}
    ),
    "one token flipped in row 3": Fault(engine=FlipsRowThree, missed={"tokens": "first in row 3, token 7:"}),
    "no rewind after a rejection": Fault(run=looked_up, engine=NeverRewinds, missed={"tokens": "differ from eager's"}),
    "one rejected token rewound of three": Fault(
        run=looked_up, decoder=RewindsOneAtMost, missed={"tokens": "differ from eager's"}
    ),
    "proposals one token late": Fault(
        run=partial(looked_up, least=3.9), decoder=Counts,
        planted=partial(patch.object, lookup, "propose", one_token_late),
        missed={"lookup": "1.00 tokens per step"},
    ),
    "chunks that overlap": Fault(
        run=prefilled, planted=partial(patch.object, prefill, "parts", overlapping),
        missed={"tokens": "must give the logits and the cache of one call"},
    ),
    "chunks that the cache does not keep": Fault(
        run=prefilled, decoder=ForgetsChunks, missed={"tokens": "must give the logits and the cache of one call"}
    ),
    "a mask of the whole cache for each chunk": Fault(
        run=prefilled, decoder=WholeMask, missed={"bytes": "take 0.9"}
    ),
    "weights replaced after the capture": Fault(
        engine=NewWeights, missed={"input": "after its capture: parameter head.weight was replaced: it is in other"}
    ),
    "cache replaced at a later reset": Fault(
        engine=Serves, decoder=ReplacesItsCacheLater, missed={"input": "after its capture: buffer layers.0.keys was"}
    ),
    "cache replaced at reset": Fault(
        decoder=ReplacesItsCache, missed={"input": "reset() replaced layers.0.keys and 1 more: write into"}
    ),
    "logits 1 % larger in a graph": Fault(
        decoder=LargerUnderCapture, missed={"tokens": "logits differ from eager's, first in row 0, token 1"}
    ),
    "reset of the tokens but one, with one output buffer": Fault(
        decoder=OneOutputBuffer,
        missed={"input": "after reset() the same tokens must give the same logits; found others"},
    ),
    "no cache": Fault(
        decoder=KeepsNoCache, missed={"input": "several tokens in one call must give the logits of as many calls"}
    ),
    "mask that lets a token see the next": Fault(
        decoder=LooksAhead, missed={"input": "several tokens in one call must give the logits of as many calls"}
    ),
    "blocks that two rows share": Fault(
        decoder=SharesBlocks, missed={"input": "several tokens in one call must give the logits of as many calls"}
    ),
    "rows that are mixed": Fault(
        decoder=MixesRows, missed={"input": "a row must give the same logits whatever the other rows hold"}
    ),
    "random numbers": Fault(decoder=DrawsRandomNumbers, missed={"input": "the calls draw random numbers"}),
    "cache that grows": Fault(decoder=Grows, missed={"input": "a call replaced seen: write into the same tensors"}),
    "reset of the tokens but one": Fault(
        decoder=DoesNotReset, missed={"input": "after reset() the same tokens must give the same logits; found others"}
    ),
    "rewind of too little": Fault(
        decoder=RewindsTooLittle, missed={"input": "after rewind(1) the same token must give the same logits; found"}
    ),
    "logits of one row": Fault(
        decoder=OneRowOnly, missed={"input": "(4, 1 to 2, vocabulary); found float32 (1, 2, 96)"}
    ),
    "tokens for logits": Fault(decoder=GivesTokens, missed={"input": "(4, 1 to 2, vocabulary); found int64 (4, 2)"}),
    "cache of 3 tokens": Fault(
        decoder=partial(SmallDecoder, length=3), missed={"input": "a whole number of at least 4 tokens; found 3"}
    ),
    "full cache": of_prompts(random_tokens(4, 60), "holds 64 tokens; a prompt of 60 and 6 new ones need 65", count=6),
    "prompt longer than the cache": of_prompts(random_tokens(4, 65), "holds 64 tokens; a prompt of 65 and 12 new ones"),
    "prompt of another dtype": of_prompts(random_tokens(4, 4).int(), "prompts are int64 token ids (rows, n) on"),
    "prompt without tokens": of_prompts(random_tokens(4, 0), "with at least one of each; found int64 (4, 0) on"),
    "prompt of one dimension": of_prompts(random_tokens(4, 4)[0], "found int64 (4,) on"),
    "tokens beyond the vocabulary": of_prompts(random_tokens(4, 4) + 90, "token ids are 0 to 95; found"),
    "k = 0": Fault(
        run=partial(looked_up, k=0), missed={"input": "k is a number of proposed tokens of at least 1; found 0"}
    ),
    "k beyond the cache": Fault(
        run=partial(looked_up, k=64), missed={"input": "k = 64 needs calls of 65 tokens; the decoder holds 64"}
    ),
    "logits of the last token in a lookup": Fault(
        run=looked_up, decoder=partial(SmallDecoder, last_only=True), missed={"input": "gives 1: static_decoder(..., "}
    ),
    "prefill longer than the cache": Fault(
        run=partial(prefilled, length=65), missed={"input": "the decoder holds 64 tokens; found a prompt of 65"}
    ),
    "chunk longer than the prompt": Fault(
        run=partial(prefilled, chunk=49), missed={"input": "at least 1 and at most the prompt's 48; found 49"}
    ),
}  # fmt: skip

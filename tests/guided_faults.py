"""Faults planted in guided generation, each with the one gate that must find it. The twin and CUDA run the same table.

Needs the extra ``guided``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from examples.small_decoder import SmallDecoder
from tests.decoding_faults import TOLERANCE, ForgetsWhatItAppends, NotFinite, PositionInPython

from pytest_cudagraph import DecodeEngine, choice, ebnf, json_schema, regex
from pytest_cudagraph.decoding.engine import call_decoder
from pytest_cudagraph.decoding.guided import GuidedEngine
from pytest_cudagraph.decoding.guided_run import GuidedRequest, GuidedRun
from pytest_cudagraph.decoding.prompts import GenerationSettings
from pytest_cudagraph.decoding.token_masks import GrammarCache
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.values import BatchReport, Verdict

WORDS = (*(bytes([each]) for each in range(256)), b'{"', b'"}', b'": ', b'", "', "é", b"</s>")
"""All bytes, a few pieces of JSON, and the stop token. The logits are of more tokens."""

STOP = len(WORDS) - 1
VOCABULARY = 290
LETTERS = [b"a", b"b", b"c", b'"', b"{", b"}", b":", b" ", b"</s>"]
"""A tokenizer that lacks most characters."""

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXT = {"type": "string", "maxLength": 12}
"""xgrammar 0.2.8 lets control characters through where a length is given."""


class Prefers(SmallDecoder):
    """One token is the most likely one wherever it is allowed."""

    token = 9  # a tab

    def forward(self, tokens):
        logits = super().forward(tokens)
        logits[..., self.token] += 99
        return logits


class PrefersNewlines(Prefers):
    token = 10


class PrefersNoToken(Prefers):
    token = 285  # the tokenizer has fewer


class EagerOnOneStep(DecodeEngine):
    calls = 0

    def step(self, tokens):
        self.calls += 1
        return call_decoder(self.decoder, tokens) if self.calls == 3 else super().step(tokens)


class ChoosesOnceEagerly(GuidedEngine):
    calls = 0

    def choose(self, logits, masks, *, graphs=True):
        self.calls += 1
        return super().choose(logits, masks, graphs=graphs and self.calls != 3)


def without_mask(logits, mask):
    return logits.argmax(-1, keepdim=True)


class MaskOfBefore(GuidedEngine):
    """As where a mask is copied into the static input after the replay."""

    before = None

    def choose(self, logits, masks, *, graphs=True):
        late = SimpleNamespace(packed=masks.packed if self.before is None else self.before)
        self.before = masks.packed.clone()
        return super().choose(logits, late, graphs=graphs)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``missed`` maps the gate that finds it to a part of its message. ``input`` is an error before any gate."""

    missed: Mapping[str, str] = field(default_factory=dict)
    grammar: Callable[[], Any] = lambda: json_schema(PERSON)
    tokenizer: Any = WORDS
    stop_token: Any = STOP
    decoder: Callable[..., Any] = SmallDecoder
    engine: type[DecodeEngine] = DecodeEngine
    guided: type[GuidedEngine] = GuidedEngine
    choose: Callable[[], Any] = lambda: None
    graph_sizes: tuple[int, ...] = (3,)
    rows: int = 3
    count: int = 40
    min_valid: Any = 1.0
    max_overhead: Any = None

    def report(self, device: str) -> BatchReport:
        torch.manual_seed(0)
        decoder = self.decoder(vocabulary=VOCABULARY).eval().to(device)
        prompts = torch.randint(0, 256, (self.rows, 6), generator=torch.Generator().manual_seed(7)).to(device)
        request = GuidedRequest(min_valid=self.min_valid, max_overhead=self.max_overhead, choose=self.choose())
        settings = GenerationSettings(output_lengths=(self.count,), tolerance=TOLERANCE)
        with self.engine(decoder, self.graph_sizes) as engine:
            grammar = GrammarCache().compiled(self.grammar(), self.tokenizer, engine.vocabulary, self.stop_token)
            guided = self.guided(engine, grammar, self.rows, request.choose)
            return Exact(guided=guided, request=request, settings=settings, device_context=None).batch(prompts)

    def found(self, device: str) -> dict[str, str]:
        """The gates that are missed, with their messages."""
        try:
            judgements = self.report(device).judgements
        except InputError as error:
            return {"input": str(error)}
        return {each.gate: "\n".join([each.reason, *each.evidence]) for each in judgements if not passes(each)}


def passes(judgement) -> bool:
    return judgement.verdict is Verdict.PASSED


class Exact(GuidedRun):
    """Without the measurement, which decides nothing here."""

    def _measured(self, report, facts, prompts, steps):
        return report


def bad(message: str, **rest: Any) -> Fault:
    return Fault(missed={"input": message}, **rest)


FAULTS = {
    "none": Fault(),
    "none, padded": Fault(graph_sizes=(4,)),
    "none, a pattern": Fault(grammar=lambda: regex("[a-c]{2,8}x")),
    "none, a choice": Fault(grammar=lambda: choice(["yes", "no", 'say "é"\n'])),
    "none, rules with a parser": Fault(grammar=lambda: ebnf('root ::= "-"? [1-9] [0-9]{0,3}', int)),
    "eager on one step": Fault(engine=EagerOnOneStep, missed={"steps": "every decode step must replay a graph"}),
    "eager on one choice": Fault(guided=ChoosesOnceEagerly, missed={"steps": "every choice must replay a graph"}),
    "batch beyond the largest graph": Fault(graph_sizes=(2,), missed={"steps": "batch 3 is beyond the largest graph"}),
    "mask ignored": Fault(choose=lambda: without_mask, missed={"mask": "no mask until then allows it"}),
    "mask ignored where the tokenizer ends": Fault(
        decoder=PrefersNoToken, choose=lambda: without_mask, missed={"mask": "row 0, token 0 is 285 (b''), which"}
    ),
    "mask stale by one step": Fault(guided=MaskOfBefore, missed={"mask": "the mask of the step before allows it"}),
    "position in Python": Fault(decoder=PositionInPython, missed={"tokens": "differ from eager's, first in row"}),
    "captured step that never writes the cache": Fault(
        decoder=ForgetsWhatItAppends, missed={"tokens": "differ from eager's, first in row"}
    ),
    "logits that are not numbers": Fault(decoder=NotFinite, missed={"finite": "row 0, token 4 has nan"}),
    "control characters in JSON strings": Fault(
        decoder=Prefers, grammar=lambda: json_schema(TEXT), missed={"validity": "0 of 3 completed outputs valid"}
    ),
    "a pattern that the matcher reads otherwise": Fault(
        decoder=PrefersNewlines, grammar=lambda: regex("a."),
        missed={"validity": "re.fullmatch finds no match"},
    ),
    "every output cut": Fault(missed={"validity": "no output of 3 was completed, 3 cut at 4 tokens"}, count=4),
    "rules without a parser": Fault(
        grammar=lambda: ebnf('root ::= "a" | "b"'), missed={"validity": "only the matcher knows this grammar"}
    ),
    "text for a grammar": bad("guided takes a grammar of json_schema(), regex(), ebnf()", grammar=lambda: "a|b"),
    "rules that do not parse": bad('Rule "other" is not defined', grammar=lambda: ebnf("root ::= other")),
    "a pattern that the matcher lacks": bad("Lookahead is not supported", grammar=lambda: regex("(?=a)b")),
    "a pattern that is none": bad("regex takes a pattern of Python's re", grammar=lambda: regex("(a")),
    "a schema that is none": bad("json_schema takes a JSON schema", grammar=lambda: json_schema({"type": "strange"})),
    "a schema of broken text": bad("json_schema takes a JSON schema", grammar=lambda: json_schema('{"type":')),
    "a schema that is a number": bad("json_schema takes", grammar=lambda: json_schema(3)),
    "a schema that nothing meets": bad(
        "minLength 5 is greater than maxLength 2",
        grammar=lambda: json_schema({"type": "string", "minLength": 5, "maxLength": 2}),
    ),
    "no option": bad("choice takes texts that are not empty", grammar=lambda: choice([])),
    "one text as options": bad("choice takes texts that are not empty", grammar=lambda: choice("yes")),
    "rules that are no text": bad("ebnf takes rules as text; found 3", grammar=lambda: ebnf(3)),
    "a parser that is none": bad("parse is a function that raises", grammar=lambda: ebnf('root ::= "a"', parse=3)),
    "a pattern that is no text": bad("regex takes a pattern", grammar=lambda: regex(3)),
    "characters that the tokenizer lacks": bad(
        "found none that is allowed after '', where 'xyz' must follow", grammar=lambda: regex("xyz"),
        tokenizer=LETTERS, stop_token=8,
    ),
    "characters that the tokenizer lacks later": bad(
        "found none that is allowed after 'a', where it goes on", grammar=lambda: regex("a[xy]"), tokenizer=LETTERS,
        stop_token=8,
    ),
    "no tokenizer": bad("a tokenizer is one of transformers, or the list of all tokens", tokenizer=3),
    "a tokenizer of numbers": bad("a tokenizer is one of transformers, or the list of all", tokenizer=[1, 2]),
    "a tokenizer larger than the logits": bad("the logits are of 290 tokens", tokenizer=[*WORDS, *[b"a"] * 90]),
    "no stop token": bad("an output ends with a stop token, an id of 0 to 289; found None", stop_token=None),
    "a stop token beyond the logits": bad("an id of 0 to 289; found 290", stop_token=290),
    "a share above 1": bad("min_valid is a share of 0 to 1; found 95", min_valid=95),
    "an overhead of nothing": bad("max_overhead is a number above 0; found 0", max_overhead=0),
    "a choice that is no function": bad("choose is a function of logits and masks; found 3", choose=lambda: 3),
    "a choice beyond the vocabulary": bad(
        "choose returns token ids of 0 to 289; found 290",
        choose=lambda: lambda logits, mask: logits.argmax(-1, keepdim=True) * 0 + 290,
    ),
    "a choice of one dimension": bad(
        "choose returns int64 tokens (3, 1); found int64 (3,)", choose=lambda: lambda logits, mask: logits.argmax(-1)
    ),
}  # fmt: skip

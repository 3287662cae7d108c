"""Masks of the allowed next tokens: a grammar compiled by xgrammar for one tokenizer, and one matcher for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_cudagraph.decoding.grammars import MISSING_EXTRA, Grammar
from pytest_cudagraph.decoding.guided_results import DisallowedToken
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text

BITS = 32
"""Tokens in one number of a packed mask. The bit of a token is 1 if it is allowed."""

_ALLOWED_TOKENIZER = (
    "a tokenizer is one of transformers, or the list of all tokens (bytes, or text for UTF-8) with stop_token=; found"
)

_MOST_TOKENIZERS = 4


class _Compiler(NamedTuple):
    """One tokenizer as xgrammar sees it. The compiler keeps every grammar that it has compiled."""

    tokenizer: Any
    """Kept, so that no other object gets its id."""
    compiler: Any
    words: list[bytes]
    stop_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrammar:
    """A grammar for the tokens of one tokenizer."""

    grammar: Grammar
    compiled: Any
    words: Sequence[bytes]
    """The bytes of each token."""
    stop_token: int
    vocabulary: int
    """Of the logits. The tokenizer may have fewer."""


class GrammarCache:
    """Compiled grammars, by tokenizer. A vocabulary of 128,000 tokens takes half a second per grammar."""

    def __init__(self) -> None:
        self._compilers: dict[tuple[int, int, int | None], _Compiler] = {}

    def compiled(self, grammar: Any, tokenizer: Any, vocabulary: int, stop_token: int | None) -> TokenGrammar:
        """``vocabulary`` is that of the logits. ``stop_token`` is by default the tokenizer's end of text.

        Raises :class:`~pytest_cudagraph.errors.InputError` for what is no grammar or no tokenizer, for a grammar that
        xgrammar cannot compile, without a stop token, and without xgrammar.
        """
        if not isinstance(grammar, Grammar):
            raise InputError(
                "guided takes a grammar of json_schema(), regex(), ebnf(), choice() or python_source(); "
                f"found {value_text(grammar)}"
            )
        key = (id(tokenizer), vocabulary, stop_token)
        if key not in self._compilers:
            self._compilers[key] = _compiler(tokenizer, vocabulary, stop_token)
            # A vocabulary takes some MB. The oldest goes.
            while len(self._compilers) > _MOST_TOKENIZERS:
                del self._compilers[next(iter(self._compilers))]
        found = self._compilers[key]
        return TokenGrammar(
            grammar=grammar,
            compiled=_compiled(found.compiler, grammar),
            words=found.words,
            stop_token=found.stop_token,
            vocabulary=vocabulary,
        )


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as missing:
        raise InputError(MISSING_EXTRA) from missing
    return xgrammar


def _compiler(tokenizer: Any, vocabulary: int, stop_token: int | None) -> _Compiler:
    xgrammar = _xgrammar()
    is_list = isinstance(tokenizer, Sequence) and not isinstance(tokenizer, str | bytes)
    stop = getattr(tokenizer, "eos_token_id", None) if stop_token is None else stop_token
    if not is_list and not callable(getattr(tokenizer, "get_vocab", None)):
        raise InputError(f"{_ALLOWED_TOKENIZER} {value_text(tokenizer)}")
    if isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < vocabulary:
        raise InputError(
            f"an output ends with a stop token, an id of 0 to {vocabulary - 1}; found {value_text(stop)}: stop_token="
        )
    sizes = {"vocab_size": vocabulary, "stop_token_ids": [stop]}
    if is_list:
        info = xgrammar.TokenizerInfo(_words(tokenizer, vocabulary), xgrammar.VocabType.RAW, **sizes)
    else:
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, **sizes)
        except ValueError as error:
            raise InputError(f"{_ALLOWED_TOKENIZER} {value_text(tokenizer)}: {error}") from None
    words = info.decoded_vocab
    # A wrong choice may be of a token that the tokenizer does not have.
    words += [b""] * (vocabulary - len(words))
    return _Compiler(tokenizer, xgrammar.GrammarCompiler(info), words, stop)


def _words(tokenizer: Sequence[Any], vocabulary: int) -> list[bytes]:
    wrong = next((each for each in tokenizer if not isinstance(each, str | bytes)), None)
    if wrong is not None or not tokenizer:
        raise InputError(f"{_ALLOWED_TOKENIZER} {value_text(tokenizer if wrong is None else wrong)}")
    if len(tokenizer) > vocabulary:
        raise InputError(f"the logits are of {vocabulary} tokens; found a tokenizer of {len(tokenizer)}")
    return [each.encode() if isinstance(each, str) else each for each in tokenizer]


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    try:
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(grammar.source, any_whitespace=False)
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.source)
        return compiler.compile_grammar(grammar.source)
    except (RuntimeError, ValueError) as error:
        # "[time] file.cc:83: Regex parsing error at position 3: ..."
        why = str(error).strip().partition("] ")[2].partition(": ")[2] or str(error)
        raise InputError(
            f"{grammar.kind} takes a grammar that xgrammar can compile; found {value_text(grammar.source)}: {why}"
        ) from None


def packed_width(vocabulary: int) -> int:
    """The numbers of a row's packed mask."""
    return -(-vocabulary // BITS)


class RowMasks:
    """The masks of the next tokens of some rows. The rows of padding allow every token."""

    def __init__(self, grammar: TokenGrammar, rows: int, *, padded_rows: int = 0, pinned: bool = False) -> None:
        self._stop = grammar.stop_token
        self._matchers = [_xgrammar().GrammarMatcher(grammar.compiled) for _ in range(rows)]
        self._ended = [False] * rows
        self.packed = torch.full(
            (rows + padded_rows, packed_width(grammar.vocabulary)), -1, dtype=torch.int32, pin_memory=pinned
        )
        """int32 on the host. Pinned, a copy to a GPU does not wait."""

    def restart(self) -> None:
        """Forget all tokens."""
        for row, matcher in enumerate(self._matchers):
            matcher.reset()
            self._ended[row] = False

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether no row goes on after these next tokens, one for each row."""
        return all(ended or token == self._stop for ended, token in zip(self._ended, tokens, strict=True))

    def accept(self, tokens: Sequence[int]) -> None:
        """Append a token to each row. A row ends with the stop token, and with a token that is not allowed."""
        for row, token in enumerate(tokens):
            if not self._ended[row]:
                self._ended[row] = not self._matchers[row].accept_token(token) or token == self._stop

    def fill(self) -> None:
        """Write the mask of each row's next token. A row that has ended allows the stop token alone."""
        for row, matcher in enumerate(self._matchers):
            if self._ended[row]:
                self.packed[row] = 0
                self.packed[row, self._stop // BITS] = _bit(self._stop)
            else:
                matcher.fill_next_token_bitmask(self.packed, row)

    def allowed(self, row: int) -> list[int]:
        """The numbers of a row's mask."""
        numbers: list[int] = self.packed[row].tolist()
        return numbers

    def forced_text(self) -> str:
        """The text that the first row must go on with. Empty if there is a choice."""
        return str(self._matchers[0].find_jump_forward_string())


def _bit(token: int) -> int:
    """The token's bit in a signed number of 32 bits."""
    bit = 1 << token % BITS
    return bit - (1 << BITS) if token % BITS == BITS - 1 else bit


def unpacked(packed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Packed masks (rows, n), int32, as booleans (rows, vocabulary). By operations of ATen, so a graph can hold it."""
    bits = torch.arange(BITS, dtype=torch.int32, device=packed.device)
    return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :vocabulary].bool()


def choose_allowed(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The most likely allowed token of each row, (rows, 1), for logits (rows, vocabulary) and packed masks."""
    disallowed = ~unpacked(mask, logits.shape[1])
    return logits.masked_fill(disallowed, float("-inf")).argmax(-1, keepdim=True)


def text_of(grammar: TokenGrammar, tokens: Sequence[int]) -> bytes:
    """The bytes of some tokens."""
    return b"".join(grammar.words[each] for each in tokens)


def first_disallowed(grammar: TokenGrammar, tokens: Sequence[Sequence[int]]) -> DisallowedToken | None:
    """The first token, in time, that a new matcher's mask of its step does not allow. After the stop token none counts.

    Raises :class:`~pytest_cudagraph.errors.InputError` where no token at all is allowed.
    """
    found = [each for row, text in enumerate(tokens) if (each := _disallowed(grammar, row, text)) is not None]
    return min(found, key=lambda each: each.position, default=None)


def _disallowed(grammar: TokenGrammar, row: int, tokens: Sequence[int]) -> DisallowedToken | None:
    masks, before = RowMasks(grammar, 1), [-1] * packed_width(grammar.vocabulary)
    for position, token in enumerate(tokens):
        masks.fill()
        numbers = masks.allowed(0)
        if not _allows(numbers, token):
            text = text_of(grammar, tokens[:position]).decode(errors="replace")
            _check_some(grammar, masks, text)
            return DisallowedToken(
                row=row,
                position=position,
                token=token,
                shown=value_text(grammar.words[token]),
                before=text,
                in_previous_mask=position > 0 and _allows(before, token),
            )
        if token == grammar.stop_token:
            break
        masks.accept([token])
        before = numbers
    return None


def _allows(numbers: Sequence[int], token: int) -> bool:
    return bool(numbers[token // BITS] >> token % BITS & 1)


def _check_some(grammar: TokenGrammar, masks: RowMasks, text: str) -> None:
    """Without an allowed token every choice is wrong, and the tokenizer is the cause."""
    if bool(unpacked(masks.packed, grammar.vocabulary).any()):
        return
    needed = masks.forced_text()
    what = f"{value_text(needed)} must follow" if needed else "it goes on"
    raise InputError(
        "a grammar must be writable with the tokenizer's tokens; found none that is allowed "
        f"after {value_text(text)}, where {what}: a tokenizer with these characters, or a grammar without them"
    )

"""Guided generation: a decode step, then the choice of a token that the grammar allows. Each is one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pytest_cudagraph.backends.buffers import describe
from pytest_cudagraph.decoding.engine import DecodeEngine, Generated, Step, call_decoder, padded
from pytest_cudagraph.decoding.guided_results import GuidedOutput
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.decoding.token_masks import RowMasks, TokenGrammar, choose_allowed, packed_width, text_of
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.protocols import CapturedGraph

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits (rows, vocabulary) and packed masks (rows, vocabulary / 32), int32, to tokens (rows, 1), int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedTokens(Generated):
    """The tokens of one guided generation, (rows, count). After a row's stop token there are stop tokens."""

    choices: GenerationReceipt
    steps: int
    """How many tokens were generated before every row had ended."""


class GuidedEngine:
    """Guided generation over the decode steps of an engine. Leaving this context manager changes nothing in it.

    Each token takes two replays: the decode step, whose own greedy choice is not used, and the choice under the mask.
    In between the host fills the mask. So on a GPU it does this while the decode step runs.
    """

    def __init__(self, engine: DecodeEngine, grammar: TokenGrammar, rows: int, choose: Choose | None = None) -> None:
        self.engine, self.grammar = engine, grammar
        self._choose: Choose = choose or choose_allowed
        self._rows = engine.rows_of_graph(rows)
        self._graph = self._captured() if engine.has_graph(self._rows, 1) else None

    def _captured(self) -> CapturedGraph:
        device, vocabulary = self.engine.device, self.engine.vocabulary
        logits = torch.zeros(self._rows, vocabulary, dtype=self.engine.dtype, device=device)
        mask = torch.full((self._rows, packed_width(vocabulary)), -1, dtype=torch.int32, device=device)
        return self.engine.capture_beside(self._checked_choose, (logits, mask), self._rows)

    def _checked_choose(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = self._choose(logits, mask)
        expected = (logits.shape[0], 1)
        if not isinstance(tokens, torch.Tensor) or tokens.shape != expected or tokens.dtype != torch.int64:
            raise InputError(f"choose returns int64 tokens {expected}; found {describe(tokens)}")
        return tokens

    def _check_ids(self, chosen: Sequence[int]) -> None:
        """A GPU that looks up a token beyond the vocabulary ends all work of its process."""
        wrong = next((token for token in chosen if not 0 <= token < self.engine.vocabulary), None)
        if wrong is not None:
            raise InputError(f"choose returns token ids of 0 to {self.engine.vocabulary - 1}; found {wrong}")

    def rows_of_graph(self, rows: int) -> int:
        """As for the engine."""
        return self.engine.rows_of_graph(rows)

    def masks(self, rows: int, size: int) -> RowMasks:
        """Masks for ``rows`` rows, padded to ``size``."""
        pinned = torch.device(self.engine.device).type == "cuda"
        return RowMasks(self.grammar, rows, padded_rows=size - rows, pinned=pinned)

    def choose(self, logits: torch.Tensor, masks: RowMasks, *, graphs: bool = True) -> torch.Tensor:
        """The next tokens, (rows, 1), for logits (rows, vocabulary). The next replay overwrites them."""
        mask = masks.packed.to(self.engine.device, non_blocking=True)
        if graphs and self._graph is not None:
            tokens: torch.Tensor = self._graph(logits, mask)
            return tokens
        return self._checked_choose(logits.clone(), mask)

    def steps(
        self, prompts: torch.Tensor, count: int, *, graphs: bool = True, forced: torch.Tensor | None = None
    ) -> Iterator[Step]:
        """At most ``count`` steps of a generation, until every row has ended. As :meth:`DecodeEngine.steps`."""
        rows, engine = prompts.shape[0], self.engine
        size = self.rows_of_graph(rows) if graphs else rows
        masks = self.masks(rows, size)
        masks.fill()
        step = engine.prefill(padded(prompts, size))
        for at in range(1, count + 1):
            tokens = self.choose(step.logits[:, -1], masks, graphs=graphs)
            yield Step(tokens, step.logits[:, -1:])
            given = tokens if forced is None else padded(forced[:, at - 1 : at], size)
            chosen = given[:rows, 0].tolist()
            self._check_ids(chosen)
            if at == count or masks.ends_with(chosen):
                return
            step = engine.step(given) if graphs else call_decoder(engine.decoder, given)
            # While a GPU computes the step.
            masks.accept(chosen)
            masks.fill()

    def generate(
        self,
        prompts: torch.Tensor,
        count: int,
        *,
        graphs: bool = True,
        forced: torch.Tensor | None = None,
        keep_logits: bool = False,
    ) -> GuidedTokens:
        """At most ``count`` tokens for each row, as :meth:`DecodeEngine.generate`."""
        engine, rows = self.engine, prompts.shape[0]
        engine.check_unchanged()
        before, chosen_before = engine.replays, self._replays
        tokens, logits = [], []
        with engine.running():
            for step in self.steps(prompts, count, graphs=graphs, forced=forced):
                tokens.append(step.tokens[:rows].clone())
                logits += [step.logits[:rows].clone()] if keep_logits else []
        steps = len(tokens)
        return GuidedTokens(
            tokens=_extended(torch.cat(tokens, 1), count, self.grammar.stop_token),
            receipt=engine.receipt(steps - 1, engine.replays - before, rows),
            choices=engine.receipt(steps, self._replays - chosen_before, rows),
            logits=_extended(torch.cat(logits, 1), count, 0) if logits else None,
            steps=steps,
        )

    @property
    def _replays(self) -> int:
        return self._graph.replays if self._graph is not None else 0


def _extended(tensor: torch.Tensor, count: int, value: int) -> torch.Tensor:
    """Up to ``count`` columns."""
    missing = tensor.new_full((tensor.shape[0], count - tensor.shape[1], *tensor.shape[2:]), value)
    return torch.cat((tensor, missing), 1)


def outputs_of(grammar: TokenGrammar, tokens: Sequence[Sequence[int]]) -> tuple[GuidedOutput, ...]:
    """The text of each row, judged by the grammar's parser."""
    return tuple(_output(grammar, each) for each in tokens)


def _output(grammar: TokenGrammar, tokens: Sequence[int]) -> GuidedOutput:
    is_cut = grammar.stop_token not in tokens
    own = tokens if is_cut else tokens[: list(tokens).index(grammar.stop_token)]
    output = text_of(grammar, own)
    problem = "" if is_cut else grammar.grammar.problem(output)
    return GuidedOutput(text=output.decode(errors="replace"), is_cut=is_cut, problem=problem)

"""Generate tokens with captured decode steps. Every graph works on one decoder's cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pytest_cudagraph import state
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.buffers import describe
from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.decoder import DEFAULT_TOLERANCE, Decoder, check_decoder, check_length
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.model_watch import ModelWatch
from pytest_cudagraph.protocols import Backend, CapturedGraph, GraphPool
from pytest_cudagraph.values import Receipt


class Step(NamedTuple):
    """The result of one call of the decoder for tokens (rows, n)."""

    tokens: torch.Tensor
    """The most likely next token after each of them, (rows, n or 1), int64."""
    logits: torch.Tensor
    """(rows, n or 1, vocabulary)."""


def call_decoder(decoder: Decoder, tokens: torch.Tensor) -> Step:
    """What is captured: the decoder and the choice of the next token, so that a step is one launch."""
    logits = decoder(tokens)
    return Step(logits.argmax(-1), logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The tokens of one generation, (rows, count), and how its steps ran."""

    tokens: torch.Tensor
    receipt: GenerationReceipt
    logits: torch.Tensor | None = None
    """(rows, count, vocabulary), if they were wanted."""

    def of_rows(self, rows: int) -> Generated:
        """The first rows: a batch without its padding."""
        return replace(self, tokens=self.tokens[:rows], logits=None if self.logits is None else self.logits[:rows])


class DecodeEngine:
    """Greedy generation with one graph per batch size and width. A width is the number of tokens of a call.

    A prompt is prefilled without a graph, because its length varies and its operations are long. Each further token is
    one replay of the graph of width 1. Fewer rows than a graph has are padded with another request. More rows than the
    largest graph run eagerly, which the receipt counts. One generation at a time: they share the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_sizes: Sequence[int],
        *,
        backend: Backend | None = None,
        capture: bool = True,
        tolerance: Tolerance = DEFAULT_TOLERANCE,
    ) -> None:
        """Check the decoder, then capture its decode step, the largest batch first.

        ``backend`` is by default CUDA for a decoder with a tensor on a GPU, else the CPU twin. Without
        ``capture`` every step runs eagerly. ``tolerance`` is what other shapes may round: several tokens in one call
        must give the logits of as many calls.

        Raises :class:`~pytest_cudagraph.errors.InputError` for a decoder that does not keep its interface, and
        :class:`~pytest_cudagraph.errors.CaptureRefusal`.
        """
        self.decoder, self._backend = decoder, backend or _backend_of(decoder)
        self._graphs: dict[tuple[int, int], CapturedGraph] = {}
        self._pool = self._backend.pool()
        self._other_pools: list[GraphPool] = []
        self._watch: ModelWatch | None = None
        for size in sorted(batch_sizes, reverse=True):
            facts = check_decoder(decoder, self._backend, size, tolerance)
            self.vocabulary, self.dtype = facts.vocabulary, facts.dtype
        for size in sorted(batch_sizes, reverse=True) if capture else ():
            self.capture(size, 1)

    @property
    def device(self) -> str:
        """``cuda:0`` or ``cpu``."""
        return self._backend.device

    def capture(self, batch_size: int, width: int) -> Receipt:
        """Capture calls of ``width`` tokens: 1 is a decode step. The decoder is reset."""
        if width > self.decoder.length:
            raise InputError(f"the decoder holds {self.decoder.length} tokens; found a call of {width}")
        self.check_unchanged()
        call = functools.partial(call_decoder, self.decoder)
        with self._backend.running():
            self.decoder.reset()
            tokens = torch.zeros(batch_size, width, dtype=torch.int64, device=self._backend.device)
            graph = self._pool.capture(call, (tokens,), {}, batch_size=batch_size, rewind=self.decoder.reset)
            self.decoder.reset()
        self._graphs[batch_size, width] = graph
        self._watch = ModelWatch(self.decoder)
        return graph.receipt

    def capture_beside(
        self, call: Callable[..., Any], args: tuple[torch.Tensor, ...], batch_size: int
    ) -> CapturedGraph:
        """Capture another call, which does not change the decoder, until the engine is closed.

        It has its own memory: in the engine's pool its replays would overwrite the results of steps.
        """
        pool = self._backend.pool()
        self._other_pools.append(pool)
        with self._backend.running():
            return pool.capture(call, args, {}, batch_size=batch_size)

    def running(self) -> AbstractContextManager[None]:
        """The mode of every call: inference mode, with the device current."""
        return self._backend.running()

    def has_graph(self, batch_size: int, width: int) -> bool:
        """Whether calls of this batch size and width were captured."""
        return (batch_size, width) in self._graphs

    def graph(self, batch_size: int, width: int = 1) -> CapturedGraph:
        """The graph of exactly this batch size and width. Raises :class:`KeyError`."""
        return self._graphs[batch_size, width]

    def rows_of_graph(self, rows: int) -> int:
        """The rows that a generation of ``rows`` computes: those of the next larger graph."""
        return min((size for size, width in self._graphs if width == 1 and size >= rows), default=rows)

    def prefill(self, prompts: torch.Tensor, chunk: int | None = None) -> Step:
        """Reset the decoder and append prompts (rows, n), ``chunk`` tokens per call. Return the last call's result.

        Raises :class:`~pytest_cudagraph.errors.InputError` if weights or buffers were replaced after a capture.
        """
        self.decoder.reset()
        self.check_unchanged()
        for part in parts(prompts, chunk):
            step = call_decoder(self.decoder, part)
        return step

    def check_unchanged(self) -> None:
        """Raise :class:`~pytest_cudagraph.errors.InputError` for a decoder that no graph describes any more.

        Once per generation. What a step replaces in Python is replaced in eager steps only, and shows in tokens.
        """
        if self._watch is not None and self._watch.has_changed():
            raise InputError(
                f"the decoder changed after its capture: {', '.join(self._watch.changes())}; graphs read the memory of "
                "their capture: write values in place (copy_()), or make a new engine"
            )

    def step(self, tokens: torch.Tensor) -> Step:
        """Append tokens (rows, width) by their graph. The next replay overwrites the result. Eager without a graph."""
        graph = self._graphs.get((tokens.shape[0], tokens.shape[1]))
        return call_decoder(self.decoder, tokens) if graph is None else graph(tokens)

    def steps(
        self,
        prompts: torch.Tensor,
        count: int,
        *,
        chunk: int | None = None,
        graphs: bool = True,
        forced: torch.Tensor | None = None,
    ) -> Iterator[Step]:
        """The ``count`` steps of a generation. The first is the prefill. The next step overwrites a step's tensors."""
        rows = prompts.shape[0]
        size = self.rows_of_graph(rows) if graphs else rows
        step = self.prefill(self.padded(prompts, size), chunk)
        yield step
        for at in range(1, count):
            tokens = step.tokens[:, -1:] if forced is None else self.padded(forced[:, at - 1 : at], size)
            step = self.step(tokens) if graphs else call_decoder(self.decoder, tokens)
            yield step

    def generate(
        self,
        prompts: torch.Tensor,
        count: int,
        *,
        chunk: int | None = None,
        graphs: bool = True,
        forced: torch.Tensor | None = None,
        keep_logits: bool = False,
    ) -> Generated:
        """Generate ``count`` tokens for each row of prompts (rows, n), int64.

        ``graphs=False`` is the eager reference: no graph, no padding. With ``forced`` (rows, count) each step gets
        these tokens instead of its own, so that two generations can be compared token by token. Raises
        :class:`~pytest_cudagraph.errors.InputError` for prompts that the decoder cannot take.
        """
        self.check_prompts(prompts, count)
        rows, before = prompts.shape[0], self.replays
        tokens, logits = [], []
        with self._backend.running():
            for step in self.steps(prompts, count, chunk=chunk, graphs=graphs, forced=forced):
                tokens.append(step.tokens[:rows, -1:].clone())
                logits += [step.logits[:rows, -1:].clone()] if keep_logits else []
        return Generated(
            tokens=torch.cat(tokens, 1),
            receipt=self.receipt(count - 1, self.replays - before, rows),
            logits=torch.cat(logits, 1) if logits else None,
        )

    def padded(self, tokens: torch.Tensor, rows: int) -> torch.Tensor:
        """Tokens (n, count) with other requests, up to ``rows`` rows.

        Each is the last row with every id moved by a constant: as a copy it would hide what rows share, such as a
        scale, and it still repeats where that row does.
        """
        missing = rows - tokens.shape[0]
        if not missing:
            return tokens
        moved = tokens[-1:] + torch.arange(1, missing + 1, device=tokens.device)[:, None]
        return torch.cat((tokens, moved % self.vocabulary))

    def overwrite_cache(self, prompts: torch.Tensor, count: int) -> None:
        """Generate ``count`` tokens eagerly from another request of the same shape, in every row of the graph.

        Two generations of the same tokens would share a cache that the second one need not write.
        """
        rows, length = self.rows_of_graph(prompts.shape[0]), prompts.shape[1]
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, self.vocabulary, (rows, length + count), generator=generator).to(self.device)
        self.generate(tokens[:, :length], count, graphs=False, forced=tokens[:, length:])

    def check_prompts(self, prompts: Any, count: int) -> None:
        """Raise :class:`~pytest_cudagraph.errors.InputError` for prompts that this decoder cannot continue."""
        allowed = f"prompts are int64 token ids (rows, n) on {self._backend.device}, with at least one of each"
        if not isinstance(prompts, torch.Tensor) or prompts.ndim != 2 or prompts.dtype != torch.int64:
            raise InputError(f"{allowed}; found {describe(prompts)}")
        if not prompts.numel() or prompts.device != torch.device(self._backend.device):
            raise InputError(f"{allowed}; found {describe(prompts)}")
        least, most = (int(bound) for bound in prompts.aminmax())
        if least < 0 or most >= self.vocabulary:
            raise InputError(f"token ids are 0 to {self.vocabulary - 1}; found {least} to {most}")
        check_length(self.decoder, prompts.shape[1], count)

    def receipt(self, steps: int, replays: int, rows: int) -> GenerationReceipt:
        """The receipt of some steps of ``rows`` rows, of which ``replays`` were launches of a graph."""
        reasons = {}
        if replays < steps:
            largest = max((size for size, width in self._graphs if width == 1), default=0)
            beyond = f"batch {rows} is beyond the largest graph ({largest})"
            reasons[beyond if rows > largest else "its graph was not replayed"] = steps - replays
        padded_rows = self.rows_of_graph(rows) - rows
        return GenerationReceipt(steps=steps, replays=replays, padded_rows=padded_rows, eager=reasons)

    @property
    def replays(self) -> int:
        """Launches of all graphs since their capture."""
        return sum(graph.replays for graph in self._graphs.values())

    def close(self) -> None:
        """Release the graphs. A second call does nothing."""
        self._graphs.clear()
        for pool in (self._pool, *self._other_pools):
            pool.close()

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _backend_of(decoder: Decoder) -> Backend:
    is_on_gpu = any(tensor.is_cuda for tensor in state.live(decoder).values())
    return open_backend("cuda" if is_on_gpu else "cpu")


_SEED = 1_000_033
"""Other than those of prompts: a request that overwrites the cache must have other tokens."""


def parts(tokens: torch.Tensor, chunk: int | None) -> Iterator[torch.Tensor]:
    """Tokens (rows, n) in parts of ``chunk``, without overlap. The last may be shorter. None: one part."""
    width = tokens.shape[1] if chunk is None else chunk
    for start in range(0, tokens.shape[1], width):
        yield tokens[:, start : start + width]

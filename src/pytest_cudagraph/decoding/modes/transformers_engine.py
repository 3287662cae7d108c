"""Models of transformers as engines: by captured steps over their static cache, or by their continuous batching."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.decoding.modes.engines import EngineFacts, LoadedEngine, LoadRequest
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.decoding.transformers_decoder import static_decoder
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.protocols import Backend

Batching = Literal["static", "continuous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine:
    """A factory of models, and the length of the cache. Make it with :func:`transformers_engine`."""

    factory: Callable[[], Any] | str
    max_length: int
    batching: Batching = "static"

    @property
    def name(self) -> str:
        """``transformers make_model``."""
        found = self.factory
        own = found.rpartition(":")[2] if isinstance(found, str) else getattr(found, "__qualname__", "model")
        return f"transformers {own}"

    def load(self, request: LoadRequest, **arguments: Any) -> LoadedEngine:
        """Make the model on the device. With graphs, capture its decode step.

        The arguments of a mode are those of transformers' ``ContinuousBatchingConfig``. Static batching has none.
        """
        if arguments and self.batching == "static":
            raise InputError(
                f"a mode of transformers_engine takes arguments with batching='continuous' only; found "
                f"{', '.join(arguments)}"
            )
        torch.set_num_threads(request.threads)
        torch.manual_seed(0)  # random weights must be the same in each process
        model = (_imported(self.factory)() if isinstance(self.factory, str) else self.factory()).to(request.device)
        if self.batching == "continuous":
            from pytest_cudagraph.decoding.modes.continuous_batching import ContinuousBatching

            return ContinuousBatching(model, self.max_length, request, arguments)
        decoder = static_decoder(model, self.max_length)
        backend = open_backend("cuda" if request.device.startswith("cuda") else "cpu")
        engine = DecodeEngine(decoder, [request.rows], backend=backend, capture=request.graphs)
        return LoadedTransformers(engine, backend, request)


def _imported(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    found: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    return found


class LoadedTransformers:
    """A :class:`DecodeEngine` that generates eagerly or by its graphs."""

    def __init__(self, engine: DecodeEngine, backend: Backend, request: LoadRequest) -> None:
        self._engine, self._backend, self._request = engine, backend, request
        self._steps = 0

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[dict[int, list[int]]]:
        """One token of each row per step. It is timed when it is on the host."""
        if len({len(prompt) for prompt in prompts}) > 1:
            raise InputError("transformers_engine takes prompts of one length")
        tokens = torch.tensor(prompts, device=self._request.device)
        self._engine.check_prompts(tokens, count)
        self._steps += count - 1
        with self._backend.running():
            for step in self._engine.steps(tokens, count, graphs=self._request.graphs):
                found = step.tokens[: len(prompts), -1].tolist()
                yield {row: [token] for row, token in enumerate(found)}

    def facts(self) -> EngineFacts:
        """The graphs count their replays themselves."""
        replays = self._engine.replays
        missing = self._steps - replays
        eager = {"its graph was not replayed" if self._request.graphs else "the eager mode": missing} if missing else {}
        return EngineFacts(
            capture_ns=self._engine.graph(self._request.rows).receipt.capture_ns if self._request.graphs else None,
            receipt=GenerationReceipt(steps=self._steps, replays=replays, eager=eager),
        )

    def close(self) -> None:
        """Release the graphs."""
        self._engine.close()


def transformers_engine(
    factory: Callable[[], Any] | str, *, max_length: int, batching: Batching = "static"
) -> TransformersEngine:
    """A model of transformers for the fixture ``engine_modes``.

    ``factory`` makes a causal language model in evaluation mode, the same in each process: a function at the top of a
    module, or its name (``"module:function"``). ``max_length`` is the most tokens of a prompt and its continuation.
    ``batching="static"`` runs all rows together over the static cache, ``"continuous"`` is transformers' own scheduler.
    Raises :class:`~pytest_cudagraph.errors.InputError` for another kind of value.
    """
    is_name = isinstance(factory, str) and all(factory.partition(":"))
    if not is_name and (isinstance(factory, str) or not callable(factory)):
        raise InputError(
            f'transformers_engine takes a function that makes a model, or its "module:function"; '
            f"found {value_text(factory)}"
        )
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 4:
        raise InputError(f"max_length is a number of tokens of at least 4; found {value_text(max_length)}")
    if batching not in get_args(Batching):
        raise InputError(f'batching is "static" or "continuous"; found {value_text(batching)}')
    return TransformersEngine(factory=factory, max_length=max_length, batching=batching)

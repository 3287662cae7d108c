"""The interface of an engine that runs in two modes, and the adapter for vLLM.

The adapter has not run against vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What an engine is loaded for."""

    graphs: bool
    """False: the eager mode."""
    rows: int
    """Prompts of each generation."""
    device: str
    """``cuda:0`` or ``cpu``: the device of the test run."""
    threads: int
    """Of torch on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a loaded engine tells of itself. None: it does not tell."""

    capture_ns: int | None = None
    receipt: GenerationReceipt | None = None
    """Of the decode steps of all generations so far. What the first generation adds is not judged: it may capture."""


class LoadedEngine(Protocol):
    """One mode, ready to generate."""

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Iterable[Mapping[int, Sequence[int]]]:
        """Generate ``count`` tokens greedily for each prompt (token ids).

        Yield the new tokens by row as soon as they are on the host: that is when they are timed. A row that gets no
        token in a step may be left out.
        """
        ...

    def facts(self) -> EngineFacts:
        """What the engine tells, after its first generation and again after its last one."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


@runtime_checkable
class Engine(Protocol):
    """An engine as a value: it is pickled and loaded in the process of each mode. So it holds arguments, no model."""

    @property
    def name(self) -> str:
        """Of the engine and its model, for reports."""
        ...

    def load(self, request: LoadRequest, **arguments: Any) -> LoadedEngine:
        """Load the mode. ``arguments`` are those of ``eager=`` or ``graphs=``. What it raises is shown as it is.

        An error with graphs is a fallback: serving code can catch it and load the eager mode.
        """
        ...


_EAGER_STEP = "vLLM's runtime mode was NONE"


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """A model served by vLLM's offline engine. Make it with :func:`vllm`."""

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``vllm Qwen/Qwen3-0.6B``."""
        return f"vllm {self.model}"

    def load(self, request: LoadRequest, **arguments: Any) -> LoadedVllm:
        """``LLM(model, enforce_eager=...)`` with metrics on. Arguments of the mode win over those of the engine."""
        try:
            from vllm import LLM, EngineArgs, SamplingParams
        except ModuleNotFoundError as missing:
            if missing.name != "vllm":
                raise
            raise InputError("engine_modes with vllm(...) needs vLLM: pip install vllm") from None
        given = {
            "enforce_eager": not request.graphs,
            # The second generation would find its prompt in the cache.
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            # Earlier versions of vLLM lack it.
            **({"cudagraph_metrics": True} if hasattr(EngineArgs, "cudagraph_metrics") else {}),
            **self.arguments,
            **arguments,
        }
        return LoadedVllm(LLM(model=self.model, **given), SamplingParams, request.rows)


class LoadedVllm:
    """A running engine of vLLM."""

    def __init__(self, llm: Any, sampling_params: Any, rows: int) -> None:
        self._engine, self._sampling_params, self._rows = llm.llm_engine, sampling_params, rows
        self._generations = 0
        self._steps: list[Any] = []
        self._listen()

    def _listen(self) -> None:
        """Keep the graph statistics of each step. Without a logger there are none."""
        loggers = getattr(self._engine, "logger_manager", None)
        if loggers is None:
            return
        record = loggers.record

        def keep(*args: Any, **kwargs: Any) -> Any:
            stats = kwargs.get("scheduler_stats", args[0] if args else None)
            found = getattr(stats, "cudagraph_stats", None)
            self._steps += [] if found is None else [found]
            return record(*args, **kwargs)

        loggers.record = keep

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[dict[int, list[int]]]:
        """Step the engine until every request has its tokens. Ends of text are ignored."""
        self._generations += 1
        rows = {f"{self._generations}-{row}": row for row in range(len(prompts))}
        told = dict.fromkeys(rows, 0)
        for name, row in rows.items():
            # Each has its own: vLLM writes into them.
            params = self._sampling_params(temperature=0.0, max_tokens=count, ignore_eos=True)
            self._engine.add_request(name, {"prompt_token_ids": list(prompts[row])}, params)
        while self._engine.has_unfinished_requests():
            step = {}
            for output in self._engine.step():
                ids, name = output.outputs[0].token_ids, output.request_id
                step[rows[name]] = list(ids[told[name] :])
                told[name] = len(ids)
            yield step

    def facts(self) -> EngineFacts:
        """The receipt of steps with one token per row. None if vLLM recorded no step, as some versions do.

        vLLM logs the time of its capture and does not give it.
        """
        decode = [each for each in self._steps if each.num_unpadded_tokens <= self._rows]
        if not decode:
            return EngineFacts()
        eager = sum(str(each.runtime_mode).rpartition(".")[2] == "NONE" for each in decode)
        return EngineFacts(
            receipt=GenerationReceipt(
                steps=len(decode),
                replays=len(decode) - eager,
                padded_rows=max(each.num_paddings for each in decode),
                eager={_EAGER_STEP: eager} if eager else {},
            )
        )

    def close(self) -> None:
        """Stop the engine's process, if it has one."""
        shutdown = getattr(getattr(self._engine, "engine_core", None), "shutdown", None)
        if shutdown is not None:
            shutdown()


def vllm(model: str, **engine_arguments: Any) -> VllmEngine:
    """vLLM's offline engine for the fixture ``engine_modes``: a model and arguments of ``vllm.LLM``.

    ``enforce_eager`` is set by the mode. Raises :class:`~pytest_cudagraph.errors.InputError` for what is no name of a
    model. That vLLM is missing shows when a mode is loaded.
    """
    if not isinstance(model, str) or not model:
        raise InputError(f"vllm takes the name or the path of a model; found {value_text(model)}")
    return VllmEngine(model, engine_arguments)

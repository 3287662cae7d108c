"""The adapter for vLLM's offline engine. It has run against vLLM 0.32 on a CPU, where vLLM has no graphs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_cudagraph.decoding.modes.engines import EngineFacts, LoadRequest
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text

_EAGER_STEP = "vLLM's runtime mode was NONE"
_GIB = 1 << 30


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
        wanted = {**self.arguments, **arguments}
        os.environ.update(environment_of(request, wanted))
        try:
            from vllm import LLM, EngineArgs, SamplingParams
        except ModuleNotFoundError as missing:
            if missing.name != "vllm":
                raise
            raise InputError("engine_modes with vllm(...) needs vLLM: pip install vllm") from None
        _check_device(request)
        defaults = {
            "enforce_eager": not request.graphs,
            # The second generation would find its prompt in the cache.
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            # Earlier versions of vLLM lack it.
            **({"cudagraph_metrics": True} if hasattr(EngineArgs, "cudagraph_metrics") else {}),
        }
        log = _CaptureLog()
        logging.getLogger("vllm").addHandler(log)
        return LoadedVllm(LLM(model=self.model, **{**defaults, **wanted}), SamplingParams, log)


def environment_of(request: LoadRequest, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What vLLM reads from the environment. The user's own values stay, but for the device of the test run."""
    # In a process of its own, the core would take requests as they come: other batches in each generation.
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if request.device == "cpu":
        # Bound to cores, both modes of two test runs would share one core.
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(request.threads)}
    wanted = {key: value for key, value in wanted.items() if key not in os.environ}
    number = int(request.device.partition(":")[2] or 0)
    # An engine of several GPUs takes the first ones.
    if number and arguments.get("tensor_parallel_size", 1) == arguments.get("pipeline_parallel_size", 1) == 1:
        visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        wanted["CUDA_VISIBLE_DEVICES"] = visible[number] if number < len(visible) else str(number)
    return wanted


def _check_device(request: LoadRequest) -> None:
    import torch
    from vllm.platforms import current_platform

    wanted = request.device.partition(":")[0]
    if current_platform.device_type != wanted:
        raise InputError(
            f"an engine runs on the device of the tests, {wanted}; found a vLLM for {current_platform.device_type}: "
            f"--cudagraph-device={current_platform.device_type}, or install another build of vLLM"
        )
    if wanted == "cpu":
        torch.set_num_threads(request.threads)  # the variable alone is too late where torch is imported already


class _CaptureLog(logging.Handler):
    """The time and the bytes of vLLM's capture, which it logs and gives nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.capture_ns: int | None = None
        self.capture_bytes: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the figures of ``Graph capturing finished in %.0f secs, took %.2f GiB``."""
        if not str(record.msg).startswith("Graph capturing finished in") or not isinstance(record.args, tuple):
            return
        seconds, gib = record.args
        self.capture_ns = (self.capture_ns or 0) + round(float(seconds) * 1e9)  # type: ignore[arg-type]
        self.capture_bytes = (self.capture_bytes or 0) + round(float(gib) * _GIB)  # type: ignore[arg-type]


class LoadedVllm:
    """A running engine of vLLM."""

    def __init__(self, llm: Any, sampling_params: Any, log: _CaptureLog) -> None:
        self._engine, self._sampling_params, self._log = llm.llm_engine, sampling_params, log
        self._generations = 0
        self._statistics: Any = None
        self._decode: list[Any] = []
        """The statistics of each decode step, None where vLLM gave none."""
        self._listen()

    def _listen(self) -> None:
        """Keep the graph statistics of the last step. Without a logger there are none."""
        loggers = getattr(self._engine, "logger_manager", None)
        if loggers is None:
            return
        record = loggers.record

        def keep(*args: Any, **kwargs: Any) -> Any:
            stats = kwargs.get("scheduler_stats", args[0] if args else None)
            self._statistics = getattr(stats, "cudagraph_stats", None)
            return record(*args, **kwargs)

        loggers.record = keep

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[dict[int, list[int] | Exception]]:
        """Step the engine until every request has its tokens. Ends of text are ignored."""
        self._generations += 1
        rows = {f"{self._generations}-{row}": row for row in range(len(prompts))}
        lengths = dict.fromkeys(rows, 0)
        for name, row in rows.items():
            # Each has its own: vLLM writes into them.
            params = self._sampling_params(temperature=0.0, max_tokens=count, ignore_eos=True)
            self._engine.add_request(name, {"prompt_token_ids": list(prompts[row])}, params)
        while self._engine.has_unfinished_requests():
            # A step with a request that has no token yet may hold its prefill, or a part of it.
            is_decode, self._statistics = all(lengths.values()), None
            step: dict[int, list[int] | Exception] = {}
            for output in self._engine.step():
                ids, name = output.outputs[0].token_ids, output.request_id
                step[rows[name]] = list(ids[lengths[name] :])
                lengths[name] = len(ids)
                if output.finished and len(ids) < count:
                    step[rows[name]] = RuntimeError(f"vLLM ended the request: {output.outputs[0].finish_reason}")
            if is_decode and any(step.values()):
                self._decode.append(self._statistics)
            yield step

    def facts(self) -> EngineFacts:
        """The receipt of the decode steps. None if vLLM gave no statistics of some, as some versions do."""
        receipt = None
        if self._decode and None not in self._decode:
            modes = [str(each.runtime_mode).rpartition(".")[2] for each in self._decode]
            eager = modes.count("NONE")
            receipt = GenerationReceipt(
                steps=len(modes),
                replays=len(modes) - eager,
                piecewise=modes.count("PIECEWISE"),
                padded_rows=max(each.num_paddings for each in self._decode),
                eager={_EAGER_STEP: eager} if eager else {},
            )
        return EngineFacts(capture_ns=self._log.capture_ns, capture_bytes=self._log.capture_bytes, receipt=receipt)

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

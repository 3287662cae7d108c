"""A stand-in with the part of vLLM's interface that the adapter uses. It computes tokens without a model.

Where each part was read, in github.com/vllm-project/vllm:

- ``LLM.llm_engine``, ``LLMEngine.add_request`` / ``step`` / ``has_unfinished_requests`` / ``logger_manager``:
  vllm/entrypoints/llm.py and vllm/v1/engine/llm_engine.py. ``step`` records statistics only with a logger, which
  ``disable_log_stats=False`` makes. ``RequestOutput`` and ``CompletionOutput``: vllm/outputs.py. Token ids are
  cumulative.
- ``CUDAGraphStat``: vllm/compilation/cuda_graph.py. ``cudagraph_metrics`` turns it on (pull request 29825). With it the
  statistics may still be missing.
- "No available memory for the cache blocks": vllm/worker/worker.py. In V1 the process EngineCore logs it, and its
  caller gets "Engine core initialization failed" (vllm/v1/engine/utils.py).
- ``torch.OutOfMemoryError`` inside a capture: as users of vLLM report it.
- ``EngineDeadError``: vllm/v1/engine/exceptions.py.
- "Graph capturing finished": vllm/v1/worker/gpu_model_runner.py and vllm/v1/worker/gpu/model_runner.py.
- ``VLLM_ENABLE_V1_MULTIPROCESSING``: vllm/envs.py. With it the core takes requests as they come, here one per step.

The model's name chooses the failure.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

NO_MEMORY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 44.53 GiB."
CAPTURE_SIZES = (1, 2, 4, 8)


@dataclass
class EngineArgs:
    model: str
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    disable_log_stats: bool = False
    gpu_memory_utilization: float = 0.9
    compilation_config: dict = field(default_factory=dict)
    cudagraph_metrics: bool = False


if os.environ.get("STAND_IN_VLLM") == "without metrics":
    del EngineArgs.cudagraph_metrics


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False


@dataclass(frozen=True)
class CUDAGraphStat:
    num_unpadded_tokens: int
    num_padded_tokens: int
    num_paddings: int
    runtime_mode: str


class EngineDeadError(Exception):
    def __init__(self):
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class LLM:
    def __init__(self, model, *, disable_log_stats=True, **kwargs):
        unknown = set(kwargs) - {each.name for each in fields(EngineArgs) if hasattr(EngineArgs, each.name)}
        if unknown:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument '{unknown.pop()}'")
        args = EngineArgs(model=model, disable_log_stats=disable_log_stats, **kwargs)
        if model == "no-cache-memory":
            fail_in_core(f"ValueError: {NO_MEMORY}")
        if model == "oom-in-capture" and not args.enforce_eager:
            fail_in_core(f"torch.OutOfMemoryError: {OUT_OF_MEMORY}")
        if not args.enforce_eager:
            log = logging.getLogger("vllm.v1.worker.gpu_model_runner")
            log.setLevel(logging.INFO)
            log.info("Graph capturing finished in %.0f secs, took %.2f GiB", 7.2, 0.25)
        self.llm_engine = LLMEngine(args)


def fail_in_core(root_cause):
    """The process of the core logs the cause. The caller is told that it is above."""
    print("(EngineCore_DP0 pid=143) ERROR 03-08 16:44:28 [core.py:708] EngineCore failed to start.")
    print("(EngineCore_DP0 pid=143) Traceback (most recent call last):")
    print(f"(EngineCore_DP0 pid=143) {root_cause}", flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


class LLMEngine:
    def __init__(self, args):
        self.args, self.requests = args, {}
        self.logger_manager = None if args.disable_log_stats else Loggers()
        self.engine_core = SimpleNamespace(shutdown=self._shut_down)

    def _shut_down(self):
        print("engine core shut down", flush=True)

    def add_request(self, request_id, prompt, params):
        assert params.temperature == 0.0
        assert params.ignore_eos
        params.ignore_eos = False  # vLLM writes into the parameters of a request
        self.requests[request_id] = SimpleNamespace(ids=prompt["prompt_token_ids"], made=[], most=params.max_tokens)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        """New requests, with the decode steps of the earlier ones, as chunked prefill schedules them."""
        if self.args.model == "dies-while-generating":
            raise EngineDeadError
        waiting = [each for each in self.requests.items() if not each[1].made]
        new = waiting[: 1 if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1" else 2]
        running = [each for each in self.requests.items() if each[1].made] + new
        verified = 4 if self.args.model == "speculates" else 1
        self._record(sum(len(request.ids) if not request.made else verified for _, request in running), bool(waiting))
        return [self._one_more(*each) for each in running]

    def _one_more(self, request_id, request):
        shift = 1 if self.args.model == "rounds-differently" and not self.args.enforce_eager else 0
        odd = shift if sum(request.ids) % 2 else 0
        request.made.append((sum(request.ids) + len(request.made) + odd) % 100)
        finished = len(request.made) == request.most
        if finished:
            del self.requests[request_id]
        completion = SimpleNamespace(
            index=0, token_ids=list(request.made), finish_reason="length" if finished else None
        )
        return SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished, metrics=None)

    def _record(self, tokens, is_mixed):
        stat = None
        if getattr(self.args, "cudagraph_metrics", False) and self.args.model != "silent-metrics":
            eager = is_mixed if self.args.model == "full-decode-only" else self.args.model == "speculates"
            beyond = tokens > CAPTURE_SIZES[-1] or self.args.model == "downgraded" or eager
            pieces = is_mixed or self.args.model == "piecewise"
            mode = "NONE" if self.args.enforce_eager or beyond else "PIECEWISE" if pieces else "FULL"
            padded = tokens if mode == "NONE" else min(size for size in CAPTURE_SIZES if size >= tokens)
            stat = CUDAGraphStat(tokens, padded, padded - tokens, mode)
        if self.logger_manager is not None:
            self.logger_manager.record(scheduler_stats=SimpleNamespace(cudagraph_stats=stat), iteration_stats=None)


class Loggers:
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None):
        pass

"""Transformers' continuous batching as an engine. On a CPU transformers turns its graphs off."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cudagraph.decoding.modes.engines import EngineFacts, LoadRequest
from pytest_cudagraph.decoding.results import GenerationReceipt
from pytest_cudagraph.errors import InputError

_PAGE_TOKENS = 16
_WAIT_S = 1.0


class ContinuousBatching:
    """A running manager of transformers, with a cache for the rows of a generation and no more.

    Without bounds it takes 60 % of the memory of a machine.
    """

    def __init__(self, model: Any, max_length: int, request: LoadRequest, arguments: Mapping[str, Any]) -> None:
        try:
            from transformers import ContinuousBatchingConfig, GenerationConfig
        except ImportError as missing:
            raise InputError("batching='continuous' needs transformers 5.17 or later") from missing
        pages = -(-max_length // _PAGE_TOKENS) + 1
        bounds = {
            "page_size": _PAGE_TOKENS,
            "num_blocks": request.rows * pages,
            "max_batch_tokens": request.rows * max_length,
            "max_requests_per_batch": request.rows,
            "use_cuda_graph": request.graphs,
            # The second generation would find its prompt in the cache.
            "allow_block_sharing": False,
            # With it, a step runs before the tokens of the last one are known.
            "use_async_batching": False,
        }
        generation_config: Any = GenerationConfig  # without types
        self._graphs = request.graphs
        self._manager = model.init_continuous_batching(
            generation_config=generation_config(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**bounds | dict(arguments)),
        )
        start_ns = time.perf_counter_ns()
        self._manager.warmup()
        warmup_ns = time.perf_counter_ns() - start_ns
        self._capture_ns = warmup_ns if any(self._manager.continuous_batching_config.cuda_graph_booleans) else None
        self._generations, self._reused_graphs, self._padded_rows = 0, 0, 0
        self._steps: Counter[str] = Counter()
        """Decode steps by the reason why no graph was replayed, empty for a replay."""
        self._count_steps(self._manager.batch_processor.model_runner)
        self._manager.start()

    def _count_steps(self, runner: Any) -> None:
        compute, states = runner.compute_batch, runner.inputs_and_outputs
        get_graph = states.get_graph

        def counted_graph(*args: Any) -> Any:
            graph = get_graph(*args)
            self._reused_graphs += graph is not None
            return graph

        def counted_compute(*args: Any) -> None:
            requests, reused = getattr(states, "requests_in_batch", None), self._reused_graphs
            is_decode = requests is not None and all(each.state.generated_len() for each in requests)
            compute(*args)
            if is_decode and requests:
                self._padded_rows = max(self._padded_rows, states.num_q_tokens - len(requests))
                self._steps["" if self._reused_graphs > reused else self._why_eager()] += 1

        states.get_graph, runner.compute_batch = counted_graph, counted_compute

    def _why_eager(self) -> str:
        if not self._graphs:
            return "the eager mode"
        return "transformers turned its graphs off" if self._capture_ns is None else "captured in this step"

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> Iterator[dict[int, list[int] | Exception]]:
        """The tokens of each row as they come. All prompts are in the queue before the first step."""
        self._generations += 1
        rows = {f"{self._generations}-{row}": row for row in range(len(prompts))}
        lengths = dict.fromkeys(rows, 0)
        with self._manager.pause():
            for name, row in rows.items():
                self._manager.add_request(
                    list(prompts[row]), request_id=name, max_new_tokens=count, streaming=True, eos_token_id=-1
                )
        while rows:
            output = self._manager.get_result(timeout=_WAIT_S)
            if output is None:
                self._check_alive()
                continue
            name, tokens = output.request_id, output.generated_tokens
            failed = output.error is not None
            yield {rows[name]: RuntimeError(output.error) if failed else list(tokens[lengths[name] :])}
            lengths[name] = len(tokens)
            if failed or output.is_finished():
                del rows[name]

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            raise RuntimeError("the generation loop of transformers has ended") from (
                self._manager.background_thread_status.fatal_error
            )

    def facts(self) -> EngineFacts:
        """The receipt of steps in which every request has a token. None with asynchronous batching."""
        receipt = None
        if self._steps:
            eager = {reason: steps for reason, steps in self._steps.items() if reason}
            receipt = GenerationReceipt(
                steps=self._steps.total(), replays=self._steps[""], padded_rows=self._padded_rows, eager=eager
            )
        return EngineFacts(capture_ns=self._capture_ns, receipt=receipt)

    def close(self) -> None:
        """End the thread that generates."""
        self._manager.stop(block=True, timeout=_WAIT_S * 10)

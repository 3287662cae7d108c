"""The ``decode_engine`` fixture and what it gives to a test. Torch is imported only when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_cudagraph.errors import CaptureRefusal, InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings, Case
from pytest_cudagraph.settings.parsing import distinct_sizes

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.decoder import Decoder
    from pytest_cudagraph.decoding.engine import DecodeEngine
    from pytest_cudagraph.decoding.grammars import Grammar
    from pytest_cudagraph.decoding.guided_results import Guided
    from pytest_cudagraph.decoding.results import Counted, Generation, Lookup, Prefill
    from pytest_cudagraph.pipeline import DeviceContext


class MakeDecodeEngine:
    """The ``decode_engine`` fixture: call it with a decoder."""

    def __init__(self, context: FixtureContext, resources: ExitStack) -> None:
        self._context, self._resources = context, resources

    @property
    def device(self) -> str:
        """The torch device the test runs on (``cuda:0`` or ``cpu``), to create the decoder there."""
        return self._context.device_context().backend.device

    def __call__(self, decoder: Decoder, *, graph_sizes: Sequence[int] | None = None) -> EngineUnderTest:
        """The scenarios of one decoder. ``graph_sizes`` are the batch sizes with a graph, by default all that run.

        A batch between two graph sizes is padded to the larger one.
        """
        return EngineUnderTest(self._context, self._resources, decoder, graph_sizes)


class EngineUnderTest:
    """One decoder in one test. Each method is a scenario with its gates."""

    def __init__(
        self, context: FixtureContext, resources: ExitStack, decoder: Decoder, graph_sizes: Sequence[int] | None
    ) -> None:
        self._context, self._resources = context, resources
        self.decoder, self._graph_sizes = decoder, graph_sizes
        self._engines: dict[tuple[int, ...], DecodeEngine] = {}

    def greedy(
        self,
        prompts: Any = None,
        *,
        prompt_lengths: Sequence[int] | None = None,
        output_lengths: Sequence[int] | None = None,
        batch_sizes: Sequence[int] | None = None,
        min_speedup: float | Mapping[int, float] | None = None,
        max_slowdown: float | None = None,
        exact: bool | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        name: str | None = None,
    ) -> tuple[Generation, ...]:
        """Generate greedily by graphs, and compare with eager: tokens, then steps, then speed.

        ``prompts`` are int64 token ids (rows, n), by default random ones of every length and batch size. The arguments
        override the marker ``decode``. Returns one :class:`~pytest_cudagraph.values.Generation` for each prompt length,
        output length and batch size. Without ``--cudagraph`` each batch size runs once, eagerly, and the result is
        empty. Raises a subclass of :class:`~pytest_cudagraph.errors.GraphTestFailure` by the gate that is missed, and
        :class:`~pytest_cudagraph.errors.InputError` for a decoder or prompts that cannot be used.
        """
        __tracebackhide__ = True
        given = prompts.shape if hasattr(prompts, "shape") and len(prompts.shape) == 2 else ()
        call = CallSettings(
            batch_sizes=[max(given[0], 1)] if given else batch_sizes,
            prompt_lengths=[max(given[1], 1)] if given else prompt_lengths,
            output_lengths=output_lengths, min_speedup=min_speedup, max_slowdown=max_slowdown, exact=exact,
            rtol=rtol, atol=atol, name=name,
        )  # fmt: skip
        return _greedy(self._context, self, prompts, call)

    def prefill(
        self,
        length: int,
        *,
        chunk: int,
        max_bytes_ratio: float | None = None,
        counting: Counted = "activations+cache",
        rtol: float | None = None,
        atol: float | None = None,
        name: str | None = None,
    ) -> Prefill:
        """Prefill a prompt of ``length`` tokens in chunks, and compare with one call: logits and cache, then bytes.

        ``max_bytes_ratio`` limits the bytes of chunks over those of one call, of what ``counting`` names. Bytes are
        counted operation by operation, so the decoder may be on ``meta``: then there are no values to compare. No graph
        is involved. Without ``--cudagraph`` nothing is judged. Raises :class:`~pytest_cudagraph.errors.TokenMismatch`,
        :class:`~pytest_cudagraph.errors.TooManyBytes` and :class:`~pytest_cudagraph.errors.InputError`.
        """
        __tracebackhide__ = True
        call = CallSettings(batch_sizes=[1], rtol=rtol, atol=atol, name=name)
        given = {"length": length, "chunk": chunk, "max_bytes_ratio": max_bytes_ratio, "counting": counting}
        return _prefill(self._context, self.decoder, given, call)

    def prompt_lookup(
        self,
        prompts: Any,
        *,
        k: int,
        ngram: tuple[int, int] = (2, 4),
        min_tokens_per_step: float | None = None,
        output_length: int | None = None,
        exact: bool | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        name: str | None = None,
    ) -> Lookup | None:
        """Generate from ``prompts``, int64 (rows, n), with ``k`` tokens per proposal, and compare with greedy.

        A proposal follows the last earlier occurrence of a suffix of ``ngram`` tokens. One captured call verifies it,
        and rejected tokens are rewound. The decoder must return the logits of its last k + 1 tokens. Returns None
        without ``--cudagraph``: then the prompts are continued once, eagerly. Raises
        :class:`~pytest_cudagraph.errors.StepNotReplayed`, :class:`~pytest_cudagraph.errors.TokenMismatch`,
        :class:`~pytest_cudagraph.errors.TooFewTokensPerStep` and :class:`~pytest_cudagraph.errors.InputError`.
        """
        __tracebackhide__ = True
        call = CallSettings(
            batch_sizes=_rows_of(prompts), output_lengths=None if output_length is None else [output_length],
            exact=exact, rtol=rtol, atol=atol, name=name,
        )  # fmt: skip
        given = {"k": k, "ngram": ngram, "min_tokens_per_step": min_tokens_per_step}
        return _lookup(self._context, self, prompts, given, call)

    def guided(
        self,
        grammar: Grammar,
        tokenizer: Any,
        *,
        prompts: Any = None,
        min_valid: float = 1.0,
        max_overhead: float | None = None,
        stop_token: int | None = None,
        choose: Any = None,
        output_length: int | None = None,
        exact: bool | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        name: str | None = None,
    ) -> Guided | None:
        """Generate under a grammar: each token is allowed by its mask and eager's, each output valid, then the time.

        ``tokenizer`` is one of transformers, or the list of all tokens with ``stop_token``. ``prompts`` are int64
        (rows, n), by default random ones. ``min_valid`` is a share of the completed outputs, ``max_overhead`` that of a
        guided step over a greedy one. ``choose(logits, mask)`` replaces the choice under the mask. Returns None without
        ``--cudagraph``: then the prompts are continued once, eagerly. Raises
        :class:`~pytest_cudagraph.errors.StepNotReplayed`, :class:`~pytest_cudagraph.errors.TokenNotAllowed`,
        :class:`~pytest_cudagraph.errors.TokenMismatch`, :class:`~pytest_cudagraph.errors.InvalidOutput`,
        :class:`~pytest_cudagraph.errors.TooMuchOverhead` and :class:`~pytest_cudagraph.errors.InputError`.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.fixtures_guided import run_guided

        call = CallSettings(
            batch_sizes=None if prompts is None else _rows_of(prompts),
            output_lengths=None if output_length is None else [output_length],
            exact=exact, rtol=rtol, atol=atol, name=name,
        )  # fmt: skip
        given = {"min_valid": min_valid, "max_overhead": max_overhead, "choose": choose}
        return run_guided(self._context, self, (grammar, tokenizer, stop_token), prompts, given, call)

    def engine(self, case: Case, device_context: DeviceContext) -> DecodeEngine:
        """The engine with graphs for a case. It lives until teardown."""
        from pytest_cudagraph.decoding.engine import DecodeEngine

        sizes = case.batch_sizes if self._graph_sizes is None else _graph_sizes(self._graph_sizes)
        if sizes not in self._engines:
            engine = DecodeEngine(self.decoder, sizes, backend=device_context.backend)
            self._engines[sizes] = self._resources.enter_context(engine)
        return self._engines[sizes]


def _graph_sizes(given: Any) -> tuple[int, ...]:
    __tracebackhide__ = True
    try:
        return distinct_sizes(given)
    except ValueError as allowed:
        raise InputError(f"graph_sizes takes {allowed}; found {value_text(given)}") from None


@hide_plugin_frames
def _greedy(
    context: FixtureContext, under_test: EngineUnderTest, prompts: Any, call: CallSettings
) -> tuple[Generation, ...]:
    """Every prompt length and output length has a report and entries of its own."""
    __tracebackhide__ = True
    from pytest_cudagraph.baseline import parametrized
    from pytest_cudagraph.decoding.greedy import check_lengths, run_once

    case = context.resolve(call)
    check_lengths(under_test.decoder, case)
    if not context.settings.enabled:
        run_once(under_test.decoder, case, prompts)
        return ()
    device_context = context.device_context(case.device)
    found: list[Generation] = []
    for prompt_length in case.prompt_lengths:
        for output_length in case.output_lengths:
            own = parametrized(call.name or context.nodeid, f"prompt{prompt_length}-output{output_length}")
            one = replace(call, name=own, prompt_lengths=[prompt_length], output_lengths=[output_length])
            cell = context.case(one)
            found += _run_cell(context, under_test, prompts, cell, device_context, case.prompt_lengths)
    return tuple(found)


def _run_cell(
    context: FixtureContext,
    under_test: EngineUnderTest,
    prompts: Any,
    cell: Case,
    device_context: DeviceContext,
    prompt_lengths: tuple[int, ...],
) -> list[Generation]:
    __tracebackhide__ = True
    from pytest_cudagraph.decoding.greedy import GreedyRun, report_of
    from pytest_cudagraph.decoding.results import Generation

    with device_context.using_its_threads():
        engine = _engine_or_failure(context, under_test, cell, device_context)
        run = GreedyRun(
            engine=engine,
            case=cell,
            device_context=device_context,
            progress=context.progress,
            prompt_lengths=prompt_lengths,
        )
        batches = run.batches(prompts)
    context.conclude(report_of(cell, device_context, batches, against_base=context.against_base))
    return [batch.scenario for batch in batches if isinstance(batch.scenario, Generation)]


@hide_plugin_frames
def _prefill(context: FixtureContext, decoder: Decoder, given: Mapping[str, Any], call: CallSettings) -> Prefill:
    __tracebackhide__ = True
    from pytest_cudagraph.baseline import parametrized
    from pytest_cudagraph.check.compare import Tolerance
    from pytest_cudagraph.decoding.greedy import report_of
    from pytest_cudagraph.decoding.prefill import PrefillRequest, compare_prefill, judge_prefill

    request = PrefillRequest(**given)
    own = parametrized(call.name or context.nodeid, f"prefill{request.length}-chunk{request.chunk}")
    case = context.case(replace(call, name=own))
    found = compare_prefill(decoder, request, Tolerance(rtol=case.rtol, atol=case.atol))
    if context.settings.enabled:
        device_context = context.device_context(case.device)
        context.conclude(report_of(case, device_context, [judge_prefill(found, request)]))
    return found


@hide_plugin_frames
def _lookup(
    context: FixtureContext, under_test: EngineUnderTest, prompts: Any, given: Mapping[str, Any], call: CallSettings
) -> Lookup | None:
    __tracebackhide__ = True
    from pytest_cudagraph.baseline import parametrized
    from pytest_cudagraph.decoding.greedy import report_of, run_once
    from pytest_cudagraph.decoding.lookup import LookupRequest, run_lookup
    from pytest_cudagraph.decoding.results import Lookup

    request = LookupRequest(**given)
    count = context.resolve(call).output_lengths[0]
    own = parametrized(call.name or context.nodeid, f"lookup{request.k}-output{count}")
    case = context.case(replace(call, name=own, output_lengths=[count]))
    if not context.settings.enabled:
        run_once(under_test.decoder, case, prompts)
        return None
    device_context = context.device_context(case.device)
    with device_context.using_its_threads():
        engine = _engine_or_failure(context, under_test, case, device_context)
        batch = run_lookup(engine, prompts, request, case, device_context)
    context.conclude(report_of(case, device_context, [batch]))
    assert isinstance(batch.scenario, Lookup)
    return batch.scenario


def _rows_of(prompts: Any) -> list[int]:
    """The batch size of prompts. What is no batch of prompts is refused later, by the engine."""
    shape = tuple(getattr(prompts, "shape", ()))
    return [max(*shape[:1], 1)] if len(shape) == 2 else [1]


def _engine_or_failure(
    context: FixtureContext, under_test: EngineUnderTest, case: Case, device_context: DeviceContext
) -> DecodeEngine:
    """The engine. A refused capture ends the test with its report."""
    __tracebackhide__ = True
    from pytest_cudagraph.decoding.greedy import report_of

    try:
        return under_test.engine(case, device_context)
    except CaptureRefusal as refused:
        context.conclude(report_of(case, device_context, refused=refused))
        raise

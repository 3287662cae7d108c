"""What the ``decode_engine`` fixture gives to a test. Torch is imported only when a scenario runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.decoding.mark import DECODE
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.session.scenario_run import ScenarioContext, results, run_scenario
from pytest_cudagraph.settings.case import CallSettings, Case
from pytest_cudagraph.settings.parsing import distinct_sizes
from pytest_cudagraph.values import BatchReport

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.decoder import Decoder
    from pytest_cudagraph.decoding.engine import DecodeEngine
    from pytest_cudagraph.decoding.grammars import Grammar
    from pytest_cudagraph.decoding.guided import GuidedEngine
    from pytest_cudagraph.decoding.guided_results import Guided
    from pytest_cudagraph.decoding.results import Counted, Generation, Lookup, Prefill
    from pytest_cudagraph.decoding.token_masks import GrammarCache

GRAMMARS: pytest.StashKey[GrammarCache] = pytest.StashKey()
"""Grammars that were compiled for a tokenizer. Absent before the first guided generation."""


class MakeDecodeEngine:
    """The ``decode_engine`` fixture: call it with a decoder."""

    def __init__(self, context: FixtureContext, resources: ExitStack) -> None:
        self.context, self._resources = context, resources

    @property
    def device(self) -> str:
        """The torch device the test runs on (``cuda:0`` or ``cpu``), to create the decoder there."""
        return self.context.device_context().backend.device

    def __call__(self, decoder: Decoder, *, graph_sizes: Sequence[int] | None = None) -> EngineUnderTest:
        """The scenarios of one decoder. ``graph_sizes`` are the batch sizes with a graph, by default all that run.

        A batch between two graph sizes is padded to the larger one.
        """
        return EngineUnderTest(self.context, self._resources, decoder, graph_sizes)


class EngineUnderTest:
    """One decoder in one test. Each method is a scenario with its gates."""

    def __init__(
        self, context: FixtureContext, resources: ExitStack, decoder: Decoder, graph_sizes: Sequence[int] | None
    ) -> None:
        self.context, self._resources = context, resources
        self.decoder, self._graph_sizes = decoder, graph_sizes
        self._engines: dict[tuple[int, ...], DecodeEngine] = {}

    @hide_plugin_frames
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
        empty. Raises a subclass of :class:`~pytest_cudagraph.GraphTestFailure` by the gate that is missed, and
        :class:`~pytest_cudagraph.InputError` for a decoder or prompts that cannot be used.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.greedy import GreedyRun
        from pytest_cudagraph.decoding.prompts import GenerationSettings, check_lengths, generate_once
        from pytest_cudagraph.decoding.results import Generation

        shape = prompts.shape if hasattr(prompts, "shape") and len(prompts.shape) == 2 else ()
        call = _call(
            prompt_lengths=[max(shape[1], 1)] if shape else prompt_lengths, output_lengths=output_lengths, exact=exact,
            batch_sizes=[max(shape[0], 1)] if shape else batch_sizes, min_speedup=min_speedup,
            max_slowdown=max_slowdown, rtol=rtol, atol=atol, name=name,
        )  # fmt: skip
        every = GenerationSettings.of(self.context.resolve(call))
        check_lengths(self.decoder, every)

        def run(scene: ScenarioContext) -> list[BatchReport]:
            settings = GenerationSettings.of(scene.case)
            one = GreedyRun(
                engine=self._engine(scene), scene=scene, settings=settings, prompt_lengths=every.prompt_lengths
            )
            return one.batches(prompts)

        calls = {
            f"prompt{length}-output{count}": _with(call, prompt_lengths=[length], output_lengths=[count])
            for length in every.prompt_lengths
            for count in every.output_lengths
        }
        batches = run_scenario(
            self.context, calls, once=lambda case: generate_once(self.decoder, case, prompts), run=run
        )
        return results(batches, Generation)

    @hide_plugin_frames
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
        is involved. Without ``--cudagraph`` nothing is judged. Raises :class:`~pytest_cudagraph.TokenMismatch`,
        :class:`~pytest_cudagraph.TooManyBytes` and :class:`~pytest_cudagraph.InputError`.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.prefill import PrefillRequest, compare_prefill, judge_prefill
        from pytest_cudagraph.decoding.prompts import GenerationSettings
        from pytest_cudagraph.decoding.results import Prefill

        request = PrefillRequest(length=length, chunk=chunk, max_bytes_ratio=max_bytes_ratio, counting=counting)

        def once(case: Case) -> list[BatchReport]:
            compared = compare_prefill(self.decoder, request, GenerationSettings.of(case).tolerance)
            return [judge_prefill(compared, request)]

        calls = {f"prefill{length}-chunk{chunk}": _call(batch_sizes=[1], rtol=rtol, atol=atol, name=name)}
        batches = run_scenario(self.context, calls, once=once, run=lambda scene: once(scene.case))
        return results(batches, Prefill)[0]

    @hide_plugin_frames
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
        :class:`~pytest_cudagraph.StepNotReplayed`, :class:`~pytest_cudagraph.TokenMismatch`,
        :class:`~pytest_cudagraph.TooFewTokensPerStep` and :class:`~pytest_cudagraph.InputError`.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.lookup import LookupRequest, run_lookup
        from pytest_cudagraph.decoding.prompts import GenerationSettings, generate_once, rows_of
        from pytest_cudagraph.decoding.results import Lookup

        request = LookupRequest(k=k, ngram=ngram, min_tokens_per_step=min_tokens_per_step)
        call = self._of_one_length(
            output_length, batch_sizes=rows_of(prompts), exact=exact, rtol=rtol, atol=atol, name=name
        )

        def run(scene: ScenarioContext) -> list[BatchReport]:
            settings = GenerationSettings.of(scene.case)
            return [run_lookup(self._engine(scene), prompts, request, settings, scene.device_context)]

        calls = {f"lookup{k}-output{call.options['output_lengths'][0]}": call}
        batches = run_scenario(
            self.context, calls, once=lambda case: generate_once(self.decoder, case, prompts), run=run
        )
        return next(iter(results(batches, Lookup)), None)

    @hide_plugin_frames
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
        :class:`~pytest_cudagraph.StepNotReplayed`, :class:`~pytest_cudagraph.TokenNotAllowed`,
        :class:`~pytest_cudagraph.TokenMismatch`, :class:`~pytest_cudagraph.InvalidOutput`,
        :class:`~pytest_cudagraph.TooMuchOverhead` and :class:`~pytest_cudagraph.InputError`.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.guided_results import Guided
        from pytest_cudagraph.decoding.guided_run import GuidedRequest, GuidedRun
        from pytest_cudagraph.decoding.prompts import GenerationSettings, checked_prompts, rows_of

        request = GuidedRequest(min_valid=min_valid, max_overhead=max_overhead, choose=choose)
        call = self._of_one_length(
            output_length, exact=exact, rtol=rtol, atol=atol, name=name,
            batch_sizes=None if prompts is None else rows_of(prompts),
        )  # fmt: skip

        language = (grammar, tokenizer, stop_token)

        def once(case: Case) -> None:
            with self._eager_engine(case) as engine:
                count = GenerationSettings.of(case).output_length
                self._guided_engine(engine, case, language).generate(checked_prompts(engine, prompts, case), count)

        def run(scene: ScenarioContext) -> list[BatchReport]:
            engine, settings = self._engine(scene), GenerationSettings.of(scene.case)
            guided = self._guided_engine(engine, scene.case, language, choose)
            one = GuidedRun(guided=guided, request=request, settings=settings, device_context=scene.device_context)
            return [one.batch(checked_prompts(engine, prompts, scene.case))]

        calls = {f"guided-output{call.options['output_lengths'][0]}": call}
        return next(iter(results(run_scenario(self.context, calls, once=once, run=run), Guided)), None)

    def _of_one_length(self, output_length: int | None, **settings: Any) -> CallSettings:
        """The settings of a scenario with one output length, and with one batch size."""
        from pytest_cudagraph.decoding.prompts import GenerationSettings

        call = _call(output_lengths=None if output_length is None else [output_length], **settings)
        case = self.context.resolve(call)
        call = replace(call, batch_sizes=case.batch_sizes[:1])
        return _with(call, output_lengths=[GenerationSettings.of(case).output_length])

    def _engine(self, scene: ScenarioContext) -> DecodeEngine:
        """The engine with graphs. It lives until teardown."""
        from pytest_cudagraph.decoding.engine import DecodeEngine
        from pytest_cudagraph.decoding.prompts import GenerationSettings

        sizes = scene.case.batch_sizes if self._graph_sizes is None else _distinct(self._graph_sizes)
        if sizes not in self._engines:
            tolerance = GenerationSettings.of(scene.case).tolerance
            engine = DecodeEngine(self.decoder, sizes, backend=scene.device_context.backend, tolerance=tolerance)
            self._engines[sizes] = self._resources.enter_context(engine)
        return self._engines[sizes]

    def _eager_engine(self, case: Case) -> DecodeEngine:
        from pytest_cudagraph.decoding.engine import DecodeEngine

        return DecodeEngine(self.decoder, case.batch_sizes, capture=False)

    def _guided_engine(
        self, engine: DecodeEngine, case: Case, language: tuple[Grammar, Any, int | None], choose: Any = None
    ) -> GuidedEngine:
        """``language`` is the grammar, the tokenizer and the stop token."""
        from pytest_cudagraph.decoding.guided import GuidedEngine
        from pytest_cudagraph.decoding.token_masks import GrammarCache

        grammar, tokenizer, stop_token = language
        cache = self.context.stash.setdefault(GRAMMARS, GrammarCache())
        compiled = cache.compiled(grammar, tokenizer, engine.vocabulary, stop_token)
        return GuidedEngine(engine, compiled, case.batch_sizes[0], choose)


def _call(**settings: Any) -> CallSettings:
    """The settings of a call: the feature's own by the keys of its mark, and those of each test."""
    options = {key: settings.pop(key) for key in DECODE.parsers if key in settings}
    return CallSettings(**settings, options=options, mark=DECODE)


def _with(call: CallSettings, **options: Any) -> CallSettings:
    return replace(call, options={**call.options, **options})


def _distinct(graph_sizes: Any) -> tuple[int, ...]:
    try:
        return distinct_sizes(graph_sizes)
    except ValueError as allowed:
        raise InputError(f"graph_sizes takes {allowed}; found {value_text(graph_sizes)}") from None

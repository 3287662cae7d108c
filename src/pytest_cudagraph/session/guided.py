"""The scenario ``guided`` of ``decode_engine``. Torch is imported only when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.session.state_keys import GRAMMARS
from pytest_cudagraph.settings.case import CallSettings, Case

if TYPE_CHECKING:
    from pytest_cudagraph.generation import DecodeEngine
    from pytest_cudagraph.generation.token_masks import TokenGrammar
    from pytest_cudagraph.session.decoding import EngineUnderTest
    from pytest_cudagraph.values import Guided

Given: TypeAlias = "tuple[Any, Any, int | None]"
"""The grammar, the tokenizer and the stop token, as the test gives them."""


@hide_plugin_frames
def run_guided(
    context: FixtureContext,
    under_test: EngineUnderTest,
    given: Given,
    prompts: Any,
    limits: Mapping[str, Any],
    call: CallSettings,
) -> Guided | None:
    """Generate, judge and report one batch."""
    __tracebackhide__ = True
    from pytest_cudagraph import generation
    from pytest_cudagraph.baseline import parametrized

    request = generation.GuidedRequest(**limits)
    resolved = context.resolve(call)
    count, rows = resolved.output_lengths[0], resolved.batch_sizes[0]
    own = parametrized(call.name or context.nodeid, f"guided-output{count}")
    case = context.case(replace(call, name=own, output_lengths=[count], batch_sizes=[rows]))
    if not context.settings.enabled:
        with generation.DecodeEngine(under_test.decoder, [rows], capture=False) as engine:
            _generate_once(context, engine, given, prompts, case)
        return None
    device_context = context.device_context(case.device)
    with device_context.using_its_threads():
        try:
            engine = under_test.engine(case, device_context)
            guided = generation.GuidedEngine(engine, _compiled(context, engine, given), rows, request.choose)
        except CaptureRefusal as refused:
            context.conclude(generation.report_of(case, device_context, refused=refused))
            raise
        run = generation.GuidedRun(guided=guided, request=request, case=case, device_context=device_context)
        batch = run.batch(_prompts_or_random(engine, prompts, case))
    context.conclude(generation.report_of(case, device_context, [batch]))
    return batch.guided


def _generate_once(context: FixtureContext, engine: DecodeEngine, given: Given, prompts: Any, case: Case) -> None:
    from pytest_cudagraph import generation

    guided = generation.GuidedEngine(engine, _compiled(context, engine, given), case.batch_sizes[0])
    guided.generate(_prompts_or_random(engine, prompts, case), case.output_lengths[0])


def _compiled(context: FixtureContext, engine: DecodeEngine, given: Given) -> TokenGrammar:
    from pytest_cudagraph.generation import GrammarCache

    grammar, tokenizer, stop_token = given
    cache = context.stash.setdefault(GRAMMARS, GrammarCache())
    return cache.compiled(grammar, tokenizer, engine.vocabulary, stop_token)


def _prompts_or_random(engine: DecodeEngine, prompts: Any, case: Case) -> Any:
    from pytest_cudagraph import generation

    rows, length = case.batch_sizes[0], case.prompt_lengths[0]
    own = generation.random_prompts(rows, length, engine.vocabulary, engine.device) if prompts is None else prompts
    engine.check_prompts(own, case.output_lengths[0])
    return own

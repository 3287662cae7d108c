"""The scenario ``guided`` of ``decode_engine``. Torch is imported only when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings, Case

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.engine import DecodeEngine
    from pytest_cudagraph.decoding.fixtures import EngineUnderTest
    from pytest_cudagraph.decoding.guided_results import Guided
    from pytest_cudagraph.decoding.token_masks import GrammarCache, TokenGrammar

GRAMMARS: pytest.StashKey[GrammarCache] = pytest.StashKey()
"""Grammars that were compiled for a tokenizer. Absent before the first guided generation."""

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
    from pytest_cudagraph.baseline import parametrized
    from pytest_cudagraph.decoding.engine import DecodeEngine
    from pytest_cudagraph.decoding.greedy import report_of
    from pytest_cudagraph.decoding.guided import GuidedEngine
    from pytest_cudagraph.decoding.guided_results import Guided
    from pytest_cudagraph.decoding.guided_run import GuidedRequest, GuidedRun

    request = GuidedRequest(**limits)
    resolved = context.resolve(call)
    count, rows = resolved.output_lengths[0], resolved.batch_sizes[0]
    own = parametrized(call.name or context.nodeid, f"guided-output{count}")
    case = context.case(replace(call, name=own, output_lengths=[count], batch_sizes=[rows]))
    if not context.settings.enabled:
        with DecodeEngine(under_test.decoder, [rows], capture=False) as engine:
            _generate_once(context, engine, given, prompts, case)
        return None
    device_context = context.device_context(case.device)
    with device_context.using_its_threads():
        try:
            engine = under_test.engine(case, device_context)
            guided = GuidedEngine(engine, _compiled(context, engine, given), rows, request.choose)
        except CaptureRefusal as refused:
            context.conclude(report_of(case, device_context, refused=refused))
            raise
        run = GuidedRun(guided=guided, request=request, case=case, device_context=device_context)
        batch = run.batch(_prompts_or_random(engine, prompts, case))
    context.conclude(report_of(case, device_context, [batch]))
    assert isinstance(batch.scenario, Guided)
    return batch.scenario


def _generate_once(context: FixtureContext, engine: DecodeEngine, given: Given, prompts: Any, case: Case) -> None:
    from pytest_cudagraph.decoding.guided import GuidedEngine

    guided = GuidedEngine(engine, _compiled(context, engine, given), case.batch_sizes[0])
    guided.generate(_prompts_or_random(engine, prompts, case), case.output_lengths[0])


def _compiled(context: FixtureContext, engine: DecodeEngine, given: Given) -> TokenGrammar:
    from pytest_cudagraph.decoding.token_masks import GrammarCache

    grammar, tokenizer, stop_token = given
    cache = context.stash.setdefault(GRAMMARS, GrammarCache())
    return cache.compiled(grammar, tokenizer, engine.vocabulary, stop_token)


def _prompts_or_random(engine: DecodeEngine, prompts: Any, case: Case) -> Any:
    from pytest_cudagraph.decoding.greedy import random_prompts

    rows, length = case.batch_sizes[0], case.prompt_lengths[0]
    own = random_prompts(rows, length, engine.vocabulary, engine.device) if prompts is None else prompts
    engine.check_prompts(own, case.output_lengths[0])
    return own

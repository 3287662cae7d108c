"""The ``engine_modes`` fixture: an engine eagerly and with graphs. Torch is imported only when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.settings.case import CallSettings

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.modes.protocol import Engine
    from pytest_cudagraph.decoding.modes.results import EngineModes

_TIMEOUT_S = 600.0
_GENERATIONS = 5


class CompareModes:
    """The ``engine_modes`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self._context = context

    def __call__(
        self,
        engine: Engine,
        *,
        prompts: Any,
        output_length: int | None = None,
        eager: Mapping[str, Any] | None = None,
        graphs: Mapping[str, Any] | None = None,
        allow_fallback: bool = False,
        max_differing_rows: int = 0,
        min_speedup: float | None = None,
        generations: int = _GENERATIONS,
        timeout_s: float = _TIMEOUT_S,
        name: str | None = None,
    ) -> EngineModes | None:
        """Run ``engine`` eagerly and with graphs, each in a process of its own, one after the other.

        ``prompts`` are token ids (rows, n). Each row gets ``output_length`` tokens, greedily. ``eager`` and ``graphs``
        are further arguments of the mode's load. A mode that takes longer than ``timeout_s`` is killed. Without
        ``--cudagraph`` the eager mode generates once, and the result is None.

        Raises :class:`~pytest_cudagraph.errors.EngineFailed`, :class:`~pytest_cudagraph.errors.FellBackToEager`,
        :class:`~pytest_cudagraph.errors.TokenMismatch` and :class:`~pytest_cudagraph.errors.SpeedupTooLow` by the gate
        that is missed, and :class:`~pytest_cudagraph.errors.InputError` for what cannot be run.
        """
        __tracebackhide__ = True
        given = {
            "engine": engine, "prompts": prompts, "eager": {} if eager is None else eager,
            "graphs": {} if graphs is None else graphs, "allow_fallback": allow_fallback,
            "max_differing_rows": max_differing_rows, "generations": generations, "timeout_s": timeout_s,
        }  # fmt: skip
        lengths = None if output_length is None else [output_length]
        return _compare(self._context, given, CallSettings(output_lengths=lengths, min_speedup=min_speedup, name=name))


@hide_plugin_frames
def _compare(context: FixtureContext, given: Mapping[str, Any], call: CallSettings) -> EngineModes | None:
    __tracebackhide__ = True
    from pytest_cudagraph.baseline import parametrized
    from pytest_cudagraph.decoding.compare_modes import ModesRequest, ModesRun, fallback_notes, token_ids
    from pytest_cudagraph.decoding.greedy import report_of
    from pytest_cudagraph.decoding.modes.results import EngineModes

    if context.settings.sample is not None:
        return None  # a comparison of revisions compares nothing of it, and engines load slowly
    prompts = token_ids(given["prompts"])
    request = ModesRequest(**{**given, "prompts": prompts})
    own = parametrized(call.name or context.nodeid, "modes")
    case = context.case(replace(call, name=own, batch_sizes=[len(prompts)]))
    device_context = context.device_context(case.device)
    run = ModesRun(request=request, case=case, device_context=device_context, progress=context.progress)
    if not context.settings.enabled:
        run.run_once()
        return None
    batch = run.batch()
    report = report_of(case, device_context, [batch])
    context.conclude(replace(report, notes=fallback_notes(batch)))
    assert isinstance(batch.scenario, EngineModes)
    return batch.scenario

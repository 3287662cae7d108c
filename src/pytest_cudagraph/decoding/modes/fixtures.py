"""What the ``engine_modes`` fixture gives to a test. Torch is imported only when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_cudagraph.decoding.mark import DECODE
from pytest_cudagraph.session.context import FixtureContext
from pytest_cudagraph.session.exceptions import hide_plugin_frames
from pytest_cudagraph.session.scenario_run import ScenarioContext, results, run_scenario
from pytest_cudagraph.settings.case import CallSettings

if TYPE_CHECKING:
    from pytest_cudagraph.decoding.modes.engines import Engine
    from pytest_cudagraph.decoding.modes.results import EngineModes

_TIMEOUT_S = 600.0
_GENERATIONS = 5
_ROUNDS = 2


class CompareModes:
    """The ``engine_modes`` fixture."""

    def __init__(self, context: FixtureContext) -> None:
        self.context = context

    @hide_plugin_frames
    def __call__(
        self,
        engine: Engine,
        *,
        prompts: Any,
        output_length: int | None = None,
        eager: Mapping[str, Any] | None = None,
        graphs: Mapping[str, Any] | None = None,
        allow_fallback: bool = False,
        allow_piecewise: bool = False,
        max_differing_rows: int = 0,
        min_speedup: float | None = None,
        generations: int = _GENERATIONS,
        rounds: int = _ROUNDS,
        requests: int = 0,
        max_error_rate: float = 0.0,
        timeout_s: float = _TIMEOUT_S,
        name: str | None = None,
    ) -> EngineModes | None:
        """Run ``engine`` eagerly and with graphs, each in ``rounds`` processes of its own, in turn.

        ``prompts`` are token ids (rows, n). Each row gets ``output_length`` tokens, greedily. ``eager`` and ``graphs``
        are further arguments of the mode's load. ``requests`` are sent at once at the end of each process, and those
        that fail are counted. A process that takes longer than ``timeout_s`` is killed. Without
        ``--cudagraph`` the eager mode generates once, and the result is None.

        Raises :class:`~pytest_cudagraph.EngineFailed`, :class:`~pytest_cudagraph.FellBackToEager`,
        :class:`~pytest_cudagraph.TokenMismatch`, :class:`~pytest_cudagraph.SpeedupTooLow` and
        :class:`~pytest_cudagraph.SlowerThanBaseline` by the gate that is missed, and
        :class:`~pytest_cudagraph.InputError` for what cannot be run.
        """
        __tracebackhide__ = True
        from pytest_cudagraph.decoding.modes.compare import ModesRequest, ModesRun, fallback_notes, token_ids
        from pytest_cudagraph.decoding.modes.results import EngineModes

        if self.context.settings.sample is not None:
            return None  # a comparison of revisions compares nothing of it, and engines load slowly
        request = ModesRequest(
            engine=engine, prompts=token_ids(prompts), eager={} if eager is None else eager,
            graphs={} if graphs is None else graphs, allow_fallback=allow_fallback,
            allow_piecewise=allow_piecewise, max_differing_rows=max_differing_rows, generations=generations,
            rounds=rounds, requests=requests, max_error_rate=max_error_rate, timeout_s=timeout_s,
        )  # fmt: skip
        options = {"output_lengths": None if output_length is None else [output_length]}
        call = CallSettings(
            batch_sizes=[len(request.prompts)], min_speedup=min_speedup, name=name, options=options, mark=DECODE
        )
        keeps = self.context.settings.base is None
        batches = run_scenario(
            self.context, {"modes": call},
            once=lambda case: ModesRun(request=request, scene=ScenarioContext.of(self.context, case)).run_once(),
            run=lambda scene: [ModesRun(request=request, scene=scene, keeps_entry=keeps).batch()], notes=fallback_notes,
        )  # fmt: skip
        return next(iter(results(batches, EngineModes)), None)

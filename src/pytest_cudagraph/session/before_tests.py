"""What is measured before the first test runs: gates finer than the machine's noise, and another revision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_cudagraph.base_revision.comparison import Command, compare_revisions
from pytest_cudagraph.foreign import printable
from pytest_cudagraph.session.state_keys import BASE, DEVICE_CONTEXTS, OURS, SETTINGS, marks_of
from pytest_cudagraph.units import first_of

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import DeviceContext

_FINE = 0.05
"""A larger gate cannot be finer than the noise of a usable machine. Nothing is measured for it."""

_NAMED = 5
"""Tests named in one warning."""


class _Gate(NamedTuple):
    """A gate of some tests and their time budget."""

    max_slowdown: float
    budget_s: float


def warn_of_fine_gates(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Warn of each ``max_slowdown`` that is smaller than this machine can detect, with the number."""
    settings = config.stash[SETTINGS]
    gates: dict[str, dict[_Gate, list[str]]] = {}
    for item in items:
        marks = marks_of(item)
        allowed = settings.max_slowdown if marks.max_slowdown is None else marks.max_slowdown
        budget_s = settings.time_budget if marks.time_budget is None else marks.time_budget
        if allowed < _FINE:
            tests = gates.setdefault(marks.device or settings.device, {})
            tests.setdefault(_Gate(allowed, budget_s), []).append(item.nodeid)
    for option, tests in gates.items():
        device_context = config.stash[DEVICE_CONTEXTS][option]
        if not device_context.why_not_judged:
            _warn(tests, device_context, settings.time_budget)


def _warn(tests: dict[_Gate, list[str]], device_context: DeviceContext, budget_s: float) -> None:
    """The noise is measured once, with the time budget of the settings. Other budgets follow from it."""
    from pytest_cudagraph.errors import FineGateWarning
    from pytest_cudagraph.pipeline.noise_floor import TOLERANCE_RATIO, noise_floors
    from pytest_cudagraph.units import percent_text

    (floor,) = noise_floors(device_context.backend, device_context.clock, budget_s=budget_s, calls=(100,))
    itself = f"the same call differs from itself by {percent_text(floor.noise_ratio)}"
    if math.isinf(floor.noise_ratio):
        itself = "too few calls were measured for more"
    for gate, nodeids in tests.items():
        detectable = TOLERANCE_RATIO + floor.detectable_within(gate.budget_s)
        if gate.max_slowdown < detectable:
            seen = f"regressions from {percent_text(detectable)} on" if math.isfinite(detectable) else "nothing"
            text = (
                f"max_slowdown={gate.max_slowdown:g} is finer than what this machine can tell: {seen} within "
                f"{gate.budget_s:g} s ({itself}); asked for by {first_of(nodeids, _NAMED)}; "
                "give a larger one, or see pytest-cudagraph doctor"
            )
            warnings.warn(FineGateWarning(printable(text)), stacklevel=2)


def compare(session: pytest.Session) -> None:
    """Measure the selected tests at the other revision and in the working tree. An error there ends the run."""
    config, settings = session.config, session.config.stash[SETTINGS]
    if settings.base is None or not config.stash[OURS] or session.testsfailed:
        return
    from pytest_cudagraph.errors import RevisionError

    command = Command(
        arguments=[str(argument) for argument in config.invocation_params.args],
        paths=config.option.file_or_dir,
        folder=config.invocation_params.dir.resolve(),
        root=config.rootpath.resolve(),
        has_cache=config.pluginmanager.has_plugin("cacheprovider"),
    )
    try:
        config.stash[BASE] = compare_revisions(
            settings.base, command, settings.base_slowdown, lambda line: _show(config, f"cudagraph base: {line}")
        )
    except RevisionError as error:
        raise pytest.UsageError(f"--cudagraph-base: {error}") from error
    finally:
        _show(config, "")


def _show(config: pytest.Config, line: str) -> None:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.isatty:
        reporter.rewrite(line, erase=True)

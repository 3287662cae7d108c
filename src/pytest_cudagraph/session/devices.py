"""The devices of a session: each is opened once, and a missing one is a usage error before the first test."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_cudagraph.session import fleet
from pytest_cudagraph.session.state_keys import DEVICE_CONTEXTS, SETTINGS, marks_of

if TYPE_CHECKING:
    from pytest_cudagraph.pipeline import DeviceContext


def check_machine(config: pytest.Config) -> None:
    """Under xdist, refuse a machine without the GPU that was asked for before any worker starts."""
    settings = config.stash[SETTINGS]
    if (settings.base or settings.sample) and (settings.workers or config.getoption("dist", "no") != "no"):
        raise pytest.UsageError("--cudagraph-base measures in processes of its own, one at a time: run without -n")
    spreads = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if settings.enabled and spreads and (settings.require_gpu or settings.device == "cuda"):
        _open_or_refuse(config, settings.device)


def open_all(config: pytest.Config, ours: list[pytest.Item]) -> None:
    for item in ours:
        _open_or_refuse(config, marks_of(item).device or config.stash[SETTINGS].device)
    if ours:
        from pytest_cudagraph.session.before_tests import warn_of_fine_gates

        warn_of_fine_gates(config, ours)


def _open_or_refuse(config: pytest.Config, option: str) -> None:
    from pytest_cudagraph.errors import BaselineError, DeviceUnavailable

    try:
        open_once(config, option)
    except (DeviceUnavailable, BaselineError) as error:
        raise pytest.UsageError(str(error)) from error


def open_once(config: pytest.Config, option: str) -> DeviceContext:
    """Open a device, or give the one opened before."""
    from pytest_cudagraph import environment

    environment.require_torch()
    from pytest_cudagraph.pipeline import open_device_context

    device_contexts = config.stash[DEVICE_CONTEXTS]
    if option not in device_contexts:
        others = {
            name: each for found in config.hook.pytest_cudagraph_backends(config=config) for name, each in found.items()
        }
        settings = config.stash[SETTINGS]
        opened = open_device_context(option, settings, others.get(option))
        if opened.device.kind == "cuda" and not opened.why_not_judged and not _uses_xdist(config):
            why = fleet.claim_once(config)
            opened = open_device_context(option, replace(settings, why_shared=why)) if why else opened
        device_contexts[option] = opened
    return device_contexts[option]


def _uses_xdist(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"

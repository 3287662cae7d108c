"""The devices of a session: each is opened once, and a missing one is a usage error before the first test.

GPUs are for this run alone: one for each xdist worker, which the controller takes and tells, or one without workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.session import terminal
from pytest_cudagraph.session.state_keys import DEVICE_CONTEXTS, SETTINGS, WHY_SHARED, marks_of
from pytest_cudagraph.settings.other_plugins import backends

if TYPE_CHECKING:
    from pytest_cudagraph.gpu_locks import VisibleGpu
    from pytest_cudagraph.pipeline import DeviceContext

_WAIT_S = 600.0
"""For GPUs that other runs hold. Then the run checks correctness only."""

_HELD = f"other runs held the GPUs for {_WAIT_S / 60:.0f} minutes; run again to judge speed"

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU, _WHY = "cudagraph_gpu", "cudagraph_why_shared"


def check_machine(config: pytest.Config) -> None:
    """Under xdist, refuse a machine without the GPU that was asked for before any worker starts."""
    settings = config.stash[SETTINGS]
    spreads = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if settings.enabled and spreads and (settings.require_gpu or settings.device == "cuda"):
        _open_or_refuse(config, settings.device)


def open_all(config: pytest.Config, ours: list[pytest.Item]) -> None:
    for item in ours:
        _open_or_refuse(config, marks_of(item).device or config.stash[SETTINGS].device)


def _open_or_refuse(config: pytest.Config, option: str) -> None:
    try:
        open_once(config, option)
    except CudagraphError as error:
        raise pytest.UsageError(str(error)) from error


def open_once(config: pytest.Config, option: str) -> DeviceContext:
    """Open a device, or give the one opened before."""
    from pytest_cudagraph import environment

    environment.require_torch()
    from pytest_cudagraph.pipeline import open_device_context

    device_contexts = config.stash[DEVICE_CONTEXTS]
    if option not in device_contexts:
        settings, make = config.stash[SETTINGS], backends(config).get(option)
        opened = open_device_context(option, settings, make)
        if opened.device.kind == "cuda" and not opened.why_not_judged and not _uses_xdist(config):
            why = claim_once(config)
            opened = open_device_context(option, replace(settings, why_shared=why)) if why else opened
        device_contexts[option] = opened
    return device_contexts[option]


def _uses_xdist(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"


def assign(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Give each worker a GPU that no other run of this user takes, if there are enough of them.

    The variable is set in the worker before it imports anything: CUDA reads it once. ``specs`` are xdist's.
    """
    settings = config.stash[SETTINGS]
    if not settings.enabled or settings.device == "cpu" or not all(spec.popen for spec in specs):
        return
    from pytest_cudagraph.gpu_locks import visible_gpus

    # A test that moved to another model of GPU would have another baseline.
    visible = visible_gpus()
    gpus = [gpu for gpu in visible if gpu.name == visible[0].name]
    if not gpus:
        return
    config.stash[WHY_SHARED] = _assign(config, specs, gpus)
    if config.stash[WHY_SHARED]:
        terminal.say(config, config.stash[WHY_SHARED])


def _assign(config: pytest.Config, specs: Sequence[Any], gpus: Sequence[VisibleGpu]) -> str:
    """Why the workers have no GPU of their own. Empty if they have."""
    from pytest_cudagraph.units import plural

    if len(specs) > len(gpus):
        share = f"{plural(len(specs), 'xdist worker')} share {plural(len(gpus), 'GPU')}"
        return f"{share}; run with -n {len(gpus)} to judge speed"
    taken = _take(config, gpus, len(specs))
    for spec, gpu in zip(specs, taken, strict=False):
        spec.env[_VARIABLE] = gpu.uuid
        terminal.say(config, f"{spec.id} measures on {gpu}")
    return "" if taken else _HELD


def claim_once(config: pytest.Config) -> str:
    """Take the GPU of a run without workers, the first visible one. Why it could not be taken, else empty."""
    from pytest_cudagraph.gpu_locks import visible_gpus

    if WHY_SHARED not in config.stash:
        gpus = visible_gpus()[:1]
        config.stash[WHY_SHARED] = _HELD if gpus and not _take(config, gpus, 1) else ""
    return config.stash[WHY_SHARED]


def _take(config: pytest.Config, gpus: Sequence[VisibleGpu], count: int) -> Sequence[VisibleGpu]:
    """The GPUs that are this run's until it ends. Empty if other runs hold too many."""
    from pytest_cudagraph.gpu_locks import take
    from pytest_cudagraph.units import plural

    waiting = f"waiting for {plural(count, 'GPU')} of other runs"
    try:
        taken = take(gpus, count, wait_s=_WAIT_S, on_wait=lambda: terminal.say(config, waiting))
    except (OSError, RuntimeError):
        # Without a folder for locks nobody can wait for this run. Its own workers still have a GPU each.
        return gpus[:count]
    if taken is None:
        return ()
    config.add_cleanup(taken.release)
    return taken.gpus


def tell(node: Any) -> None:
    """Tell a worker which GPU it has, or why it has none of its own."""
    why = node.config.stash.get(WHY_SHARED, None)
    if why is not None:
        node.workerinput |= {_GPU: "" if why else node.gateway.spec.env[_VARIABLE], _WHY: why}


def gpu_of(workerinput: dict[str, Any]) -> tuple[str, str]:
    """The UUID of a worker's own GPU, and why it has none. Both are empty where there is no GPU."""
    return workerinput.get(_GPU, ""), workerinput.get(_WHY, "")

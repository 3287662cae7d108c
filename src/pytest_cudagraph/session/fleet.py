"""One GPU for each xdist worker: the controller takes them before it starts the workers, and tells each its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_cudagraph.session.state_keys import SETTINGS, WHY_SHARED

_WAIT_S = 600.0
"""For GPUs that other runs hold. Then the run checks correctness only."""

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU, _WHY = "cudagraph_gpu", "cudagraph_why_shared"


def assign(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Give each worker a GPU that no other run of this user takes, if there are enough of them.

    The variable is set in the worker before it imports anything: CUDA reads it once. ``specs`` are xdist's.
    """
    settings = config.stash[SETTINGS]
    if not settings.enabled or settings.device == "cpu" or not all(spec.popen for spec in specs):
        return
    from pytest_cudagraph.gpu_locks import visible_gpus

    # A test that moved to another model of GPU would have another baseline.
    found = visible_gpus()
    gpus = [gpu for gpu in found if gpu.name == found[0].name]
    if not gpus:
        return
    config.stash[WHY_SHARED] = _assign(config, specs, gpus)
    if config.stash[WHY_SHARED]:
        _say(config, config.stash[WHY_SHARED])


def _assign(config: pytest.Config, specs: Sequence[Any], gpus: Sequence[Any]) -> str:
    """Why the workers have no GPU of their own. Empty if they have."""
    from pytest_cudagraph.gpu_locks import take
    from pytest_cudagraph.units import plural

    count = len(specs)
    if count > len(gpus):
        share = f"{plural(count, 'xdist worker')} share {plural(len(gpus), 'GPU')}"
        return f"{share}; run with -n {len(gpus)} to judge speed"
    try:
        taken = take(
            gpus,
            count,
            wait_s=_WAIT_S,
            on_wait=lambda: _say(config, f"waiting for {plural(count, 'GPU')} of other runs"),
        )
    except (OSError, RuntimeError) as error:
        return f"the locks of the GPUs cannot be written ({error}); run without -n to judge speed"
    if taken is None:
        return f"other runs held the GPUs for {_WAIT_S / 60:.0f} minutes; run again to judge speed"
    config.add_cleanup(taken.release)
    for spec, gpu in zip(specs, taken.gpus, strict=True):
        spec.env[_VARIABLE] = gpu.uuid
        _say(config, f"{spec.id} measures on {gpu}")
    return ""


def tell(node: Any) -> None:
    """Tell a worker which GPU it has, or why it has none of its own."""
    why = node.config.stash.get(WHY_SHARED, None)
    if why is not None:
        node.workerinput |= {_GPU: "" if why else node.gateway.spec.env[_VARIABLE], _WHY: why}


def gpu_of(workerinput: dict[str, Any]) -> tuple[str, str]:
    """The UUID of a worker's own GPU, and why it has none. Both are empty where there is no GPU."""
    return workerinput.get(_GPU, ""), workerinput.get(_WHY, "")


def _say(config: pytest.Config, line: str) -> None:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"cudagraph: {line}")

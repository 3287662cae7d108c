"""Where the cases run, and the three figures at the end: found, missed, false alarms."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.conformance.stages import PROPERTY

from pytest_cudagraph.device import EMULATED, why_no_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    """The twin everywhere; CUDA where there is a GPU, or an emulated device."""
    if request.param == "cuda":
        missing = why_no_gpu()
        if missing not in (None, EMULATED):
            pytest.skip(f"needs a CUDA GPU: {missing.found}")
    return request.param


@pytest.fixture(autouse=True)
def _one_thread_and_generators_kept():
    """Modules of a few numbers are slower on several threads; cases that draw leave no trace."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter):
    outcomes = Counter()
    for report in (*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())):
        outcomes.update(value for name, value in report.user_properties if name == PROPERTY)
    for kind in sorted({kind for kind, _ in outcomes}):
        found, missed, alarms, quiet = (outcomes[kind, each] for each in ("found", "missed", "false alarm", "clean"))
        terminalreporter.write_line(
            f"conformance on {kind}: found {found} of {found + missed} hazards, missed {missed}; "
            f"{alarms} false alarms on {alarms + quiet} clean modules"
        )

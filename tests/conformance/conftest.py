"""Where the cases run, the three figures at the end (found, missed, false alarms), and the page's update."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from tests.conformance.libraries.declared import make_torchvision_importable
from tests.conformance.stages import PROPERTY
from tests.conformance.twin_page import PAGE, is_updating, page_with, updated

from pytest_cudagraph.device import EMULATED, why_no_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request, known_frozen):
    """The twin everywhere; CUDA where there is a GPU, or an emulated device, whose streams then queue their work."""
    missing = why_no_gpu() if request.param == "cuda" else None
    if missing not in (None, EMULATED):
        pytest.skip(f"needs a CUDA GPU: {missing.found}")
    with _queued_work() if missing else nullcontext():
        yield request.param


def _queued_work():
    import cuda_emulator

    return cuda_emulator.asynchronous(seed=1)


@pytest.fixture(autouse=True)
def _generators_kept():
    """Cases that draw leave no trace."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(autouse=True, scope="session")
def _libraries_usable(tmp_path_factory):
    """transformers imports torchvision where it is installed. ultralytics writes its settings when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("ultralytics")))
        make_torchvision_importable()
        yield


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):
        return  # a worker of xdist has run only its share
    reports = (*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ()))
    results = [value for each in reports for name, value in each.user_properties if name == PROPERTY]
    for witness in sorted({witness for witness, *_ in results}):
        outcomes = Counter(outcome for each, _, outcome, _ in results if each == witness)
        found, missed, alarms, quiet = (outcomes[each] for each in ("found", "missed", "false alarm", "clean"))
        terminalreporter.write_line(
            f"conformance on {witness}: found {found} of {found + missed} hazards, missed {missed}; "
            f"{alarms} false alarms on {alarms + quiet} clean modules"
        )
        if is_updating(witness):
            seen = {name: words for each, name, _, words in results if each == witness}
            PAGE.write_text(page_with(updated(witness, seen)), encoding="utf-8")

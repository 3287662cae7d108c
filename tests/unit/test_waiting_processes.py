"""A process that waits for this one holds the GPU, and is no neighbour: it computes nothing meanwhile."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.unit.monitor.test_perf_monitor import UUID, FakeNvml

from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.pipeline.device_context import open_device_context
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS

OURS, WHO_WAITS, NEIGHBOUR = os.getpid(), 7, 8


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([OURS, WHO_WAITS], 0),
        ([OURS, WHO_WAITS, NEIGHBOUR], 1),
        ([101, 102], 0),  # a container sees the host's numbers, of us and of who waits
        ([OURS], 0),
        ([], 0),
    ],
)
def test_who_waits_for_this_process_does_not_share_the_gpu(monkeypatch, pids, others):
    properties = SimpleNamespace(name="NVIDIA H200", uuid=UUID)
    for name, value in (("is_available", True), ("device_count", 1), ("is_initialized", True)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(pids=pids))
    with PerfMonitor(waiting_processes=1) as watch:
        pass
    assert [sample.other_processes for sample in watch.card.gpus[0].samples] == [others, others]


def test_a_process_that_measures_for_a_comparison_of_revisions_is_waited_for(tmp_path):
    settings = Settings(**{option.setting: option.default for option in OPTIONS}, rootdir=tmp_path)
    assert open_device_context("cpu", settings).waiting_processes == 0
    assert open_device_context("cpu", replace(settings, sample=tmp_path)).waiting_processes == 1

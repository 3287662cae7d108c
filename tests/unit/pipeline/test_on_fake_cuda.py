"""All stages on the CUDA backend with a fake of torch.cuda: what only a run on a GPU does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.facts import H200
from tests.fake_cuda import FakeCuda
from tests.unit.pipeline.test_model_run import context_of, run_of
from torch import nn

from pytest_cudagraph import measure, pipeline
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.monitor import PerfMonitor
from pytest_cudagraph.values import Verdict

pytestmark = pytest.mark.usefixtures("no_collections", "known_frozen")


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    """The seeds of the GPUs' generators, each with the seed of the host's at that moment."""
    given = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: given.append((seed, torch.initial_seed())))
    return given


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def gpu(cuda):
    return CudaBackend(cuda=cuda, device="cpu")


def report_of(model, backend, **facts):
    with run_of(model, context_of(backend=backend, device=H200, **facts)) as run:
        return pipeline.run_stages(run)


def test_a_good_model_passes_every_stage_and_its_graphs_are_released(gpu, cuda):
    report = report_of(nn.Linear(4, 4).eval(), gpu)
    assert report.verdict is Verdict.PASSED
    assert [batch.batch_size for batch in report.batches] == [1, 2]
    assert (cuda.graphs, cuda.underway, set(cuda.shares.values())) == ([], [], {0})


def test_the_device_time_of_a_replay_is_read_from_events_and_is_its_busy_time(gpu, cuda):
    timing = report_of(nn.Linear(4, 4).eval(), gpu).at(1).timing
    assert timing.device_replay.median_ns == 250_000.0
    assert timing.busy_ns == 250_000.0
    assert "event_synchronize" in cuda.names()


def test_a_gpu_that_is_disturbed_decides_nothing_and_a_cpu_is_not_asked(gpu, monkeypatch):
    monkeypatch.setattr(PerfMonitor, "check", lambda watch: "GPU 0 held its clocks down (heat limit for 12 ms)")
    report = report_of(nn.Linear(4, 4).eval(), gpu)
    assert report.verdict is Verdict.INCONCLUSIVE
    reasons = [judgement.reason for judgement in report.at(1).judgements if judgement.gate == "speedup"]
    assert "GPU 0 held its clocks down (heat limit for 12 ms)" in reasons[0]
    assert report_of(nn.Linear(4, 4).eval(), CpuBackend()).verdict is Verdict.PASSED


def test_without_event_readings_the_busy_time_stays_open(gpu):
    def without_events(arms, **options):
        return replace(measure.measure_arms(arms, **options), device_replay=None)

    assert report_of(nn.Linear(4, 4).eval(), gpu, measure=without_events).at(1).timing.busy_ns is None


def test_the_check_seeds_the_gpus_generators_with_the_hosts(gpu, seeds):
    report_of(nn.Linear(4, 4).eval(), gpu)
    assert len(seeds) > 2
    assert all(device == host for device, host in seeds)
    seeds.clear()
    report_of(nn.Linear(4, 4).eval(), CpuBackend())
    assert seeds == []


def test_kernels_that_nobody_can_count_do_not_fail_a_model(gpu):
    batch = report_of(nn.Linear(4, 4).eval(), gpu).at(2)
    assert batch.receipt.kernels is None
    assert batch.receipt.not_counted != ""
    (structure,) = [judgement for judgement in batch.judgements if judgement.gate == "structure"]
    assert structure.verdict is Verdict.PASSED
    assert batch.receipt.not_counted in structure.reason


def test_a_model_that_reads_on_the_host_fails_at_its_capture_in_cudas_words(gpu, cuda, monkeypatch):
    # On torch, where nobody looks for state of the model. Refuses in a capture only.
    monkeypatch.setattr(torch, "read_back", cuda.refuse, raising=False)

    def model(x):
        torch.read_back()
        return x + 1

    report = report_of(model, gpu)
    assert report.verdict is Verdict.NOT_CAPTURED
    told = "\n".join(judgement.reason for judgement in report.at(2).judgements)
    assert "operation not permitted when stream is capturing" in told
    assert (cuda.graphs, cuda.underway) == ([], [])

"""``pytest-cudagraph doctor`` on a GPU: the card, the noise floor, an exit code that says what the lines say."""

from __future__ import annotations

import math
import re

import pytest
import torch

from pytest_cudagraph import device
from pytest_cudagraph.cli import main
from pytest_cudagraph.measure import PerfCounterClock
from pytest_cudagraph.pipeline.noise_floor import noise_floors

_ROW = re.compile(r"^ *[\d.]+ (?:ns|µs|ms) .*%.* \d\.\d{3}x \(")


@pytest.mark.needs_speed("the emulated device is unfit, however quiet it is")
def test_the_doctor_tells_the_card_the_noise_floor_and_whether_the_machine_is_fit(capsys):
    code = main(["doctor", "--device=cuda", "--time-budget=10"])
    said = capsys.readouterr().out
    lines, name = said.splitlines(), torch.cuda.get_device_name(0)
    assert any(line.startswith("device: ") and name in line and line.endswith("; speed is judged") for line in lines)
    assert f"nvml: driver {device.driver_version()}, " in said
    assert any(line.startswith(f"GPU 0 {name}: SM ") for line in lines), said
    assert len([line for line in lines if _ROW.match(line)]) == 3, said
    unfit = [line for line in lines if line.startswith("unfit: ")]
    assert code == (1 if unfit else 0), said
    assert ("fit: nothing found that prevents judging speed" in lines) == (not unfit), said
    print(said)  # with -rP: what this machine is


def test_this_process_alone_is_no_neighbour_of_itself(capsys):
    main(["doctor", "--device=cuda", "--time-budget=1"])
    assert "shared with" not in capsys.readouterr().out


def test_a_neighbour_and_a_throttle_make_it_unfit(answering, capsys):
    answers = {
        "nvmlDeviceGetComputeRunningProcesses": {4242: 2**30},
        "nvmlDeviceGetCurrentClocksEventReasons": 0x40,
        "nvmlDeviceGetClockInfo": 600,
    }
    with answering(answers):
        assert main(["doctor", "--device=cuda", "--time-budget=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = "GPU 0 held its clocks down (heat (hardware)); GPU 0 was shared with another process"
    assert any(line.startswith(f"unfit: {found}; stop other work") for line in lines), lines
    assert any(line.startswith(f"GPU 0 {torch.cuda.get_device_name(0)}: SM 600 of 1000 MHz, ") for line in lines), lines
    assert "  shared with 1 other process" in lines


@pytest.mark.needs_speed("longer calls are longer on a GPU, equal ones equal")
def test_the_noise_floor_of_a_gpu_is_that_of_calls_of_three_lengths(backend):
    floors = noise_floors(backend, PerfCounterClock(), budget_s=10)
    short, middle, long = (floor.call_ns for floor in floors)
    assert short < middle < long
    for floor in floors:
        assert math.isfinite(floor.noise_ratio), floor
        assert floor.detectable_ratio > 0
        # The same callable on both sides: what is told apart by more than this is no regression but the machine.
        assert 0.9 < floor.apparent.estimate < 1.1, floor

"""The process of a mode: whatever an engine does there, the test has one clear failure and nothing stays behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engines import CountingEngine
from tests.fake_nvml import GIB, FakeNvml

from pytest_cudagraph import InputError
from pytest_cudagraph.decoding.modes.engines import LoadRequest
from pytest_cudagraph.decoding.modes.mode_process import generate, scheduled_ns, used_device_bytes, waited_ratio
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, graph_lines, run_mode
from pytest_cudagraph.decoding.modes.results import RequestErrors


def run(engine, *, timeout_s=60, requests=0, **arguments):
    load = LoadRequest(graphs=True, rows=2, device="cpu", threads=1)
    request = ModeRequest(
        engine=engine,
        load=load,
        arguments=arguments,
        prompts=[[1, 2], [3, 4]],
        count=4,
        generations=2,
        requests=requests,
    )
    return run_mode(request, timeout_s)


@pytest.mark.parametrize(
    ("fault", "stage", "error", "is_raised"),
    [
        ("raises in load", "load", "RuntimeError: capture failed:\nno ?[31mgraph?[0m today (engines.py:", True),
        ("exits", "load", "SystemExit: 3 (engines.py:", True),
        ("raises in generate", "generate", "ValueError: no such token (engines.py:", True),
        ("raises in close", "close", "OSError: still busy (engines.py:", True),
        ("dies", "generate", "its process was killed by SIGSEGV and left no result", False),
        ("leaves", "generate", "its process ended with exit code 7 and left no result", False),
        (
            "a token less",
            "generate",
            "each generation gives 4 tokens for each of 2 rows; found 3 tokens for row 0",
            False,
        ),
        ("a row less", "generate", "each generation gives 4 tokens for each of 2 rows; found rows [1]", False),
    ],
)
def test_a_fault_is_told_with_its_stage_and_the_end_of_the_output(fault, stage, error, is_raised):
    failure = run(CountingEngine(fault)).mode.failure
    assert (failure.stage, failure.is_raised) == (stage, is_raised)
    assert failure.error.startswith(error)
    if fault == "dies":
        assert failure.output[0] == "Fatal Python error: Segmentation fault"
        assert any("engines.py" in line for line in failure.output)
    else:
        assert failure.output in ((), ("loading {}",))


def test_an_engine_that_hangs_is_killed():
    failure = run(CountingEngine("hangs"), timeout_s=2).mode.failure
    assert failure.error == "its process did not end within 2 s and was killed (timeout_s=)"
    # Where it hung, although another thread's stack is printed before.
    assert failure.output[0] == "Fatal Python error: Aborted"
    assert "in load" in failure.output[2]
    assert "engines.py" in failure.output[2]


@pytest.mark.parametrize(
    ("failing", "used"),
    [((), 6 * GIB), (("nvmlInit",), None), (("nvmlDeviceGetMemoryInfo",), None)],
)
def test_the_used_memory_is_that_of_all_gpus_and_none_without_nvml(monkeypatch, failing, used):
    nvml = FakeNvml(2, failing=failing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert used_device_bytes() == used
    assert nvml.open == 0


@pytest.mark.parametrize("fault", ["garbage", "leaves a thread"])
def test_garbage_on_the_output_and_threads_that_never_end_change_nothing(fault):
    found = run(CountingEngine(fault), timeout_s=20, a=1)
    assert found.mode.failure is None
    assert [row.tokens for row in found.generations[1]] == [(3, 4, 5, 6), (7, 8, 9, 10)]


def test_a_mistake_in_the_use_of_an_engine_is_an_input_error():
    with pytest.raises(InputError, match="prompts of one length, please"):
        run(CountingEngine("mistake"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("counts prefills", "decode steps include those that replayed a graph; found 12 replays in 9 steps"),
        ("tells a part", "tells of every decode step .* found a receipt of 2 decode steps, and 9 that gave tokens"),
        ("half tokens", "generate gives whole numbers as tokens; found 3.5 for row 0"),
    ],
)
def test_what_the_engine_tells_is_compared_with_what_it_gave(fault, told):
    with pytest.raises(InputError, match=told):
        run(CountingEngine(fault))


@pytest.mark.parametrize(
    ("fault", "failed", "first"),
    [
        ("", 0, ""),
        ("no room", 1, "request 4: RuntimeError: no room"),
        ("dies of many", 5, "request 0: MemoryError: too many"),
        ("a row less", 1, "request 0: 0 of 4 tokens"),
    ],
)
def test_requests_that_fail_when_many_are_sent_at_once_are_counted(fault, failed, first):
    mode = run(CountingEngine(fault), requests=5).mode
    assert mode.errors == RequestErrors(requests=5, failed=failed, first=first)


@pytest.mark.parametrize(
    ("before", "after", "ratio"),
    [((10, 5), (40, 15), 0.25), ((10, 5), (10, 5), None), ((10, 5), (40, 3), 0.0), (None, (1, 1), None)],
)
def test_the_time_that_threads_waited_for_a_core_is_a_share(before, after, ratio):
    assert waited_ratio(before, after) == ratio


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system tells no waits")
def test_the_waits_of_this_process_are_read():
    ran_ns, waited_ns = scheduled_ns()
    assert ran_ns > 0
    assert waited_ns >= 0


def test_numbers_of_other_libraries_are_tokens():
    step = {0: torch.tensor([3, 4]), np.int64(1): np.array([5])}
    found = generate(SimpleNamespace(generate=lambda prompts, count: [step]), SimpleNamespace(prompts=[], count=1))
    assert found["tokens"] == [[3, 4], [5]]


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        ([{0: [1], 1: [1]}, {0: [2], 1: [2]}, {0: [3]}], 2),
        # The second row's prefill is part of the first row's second step.
        ([{0: [1]}, {0: [2], 1: [1]}, {0: [3], 1: [2]}], 1),
        ([{0: [1]}, {1: [1]}, {0: [2, 3]}, {1: [2, 3]}], 1),
        ([{0: []}, {0: [1]}, {0: []}], 0),
        ([], 0),
    ],
)
def test_steps_that_no_prefill_is_part_of_are_counted(steps, counted):
    engine = SimpleNamespace(generate=lambda prompts, count: steps)
    assert generate(engine, SimpleNamespace(prompts=[], count=3))["decode_steps"] == counted


def test_the_lines_of_an_output_that_speak_of_graphs_are_kept(tmp_path):
    log = tmp_path / "output.txt"
    log.write_text("loading\nWARNING: no CUDA graphs here\nloading\nWARNING: no CUDA graphs here\nrunning Eager\n")
    assert graph_lines(log) == ["WARNING: no CUDA graphs here", "running Eager"]


ENGINE = """
from dataclasses import dataclass
from tests.engines import CountingEngine

@dataclass(frozen=True)
class Own(CountingEngine):
    pass
"""


def test_an_engine_of_a_test_file_is_found_although_the_file_is_on_no_path(tmp_path, monkeypatch):
    file = tmp_path / "test_own_engine.py"
    file.write_text(ENGINE)
    module = type(sys)("test_own_engine")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "test_own_engine", module)
    exec(compile(ENGINE, file, "exec"), module.__dict__)
    assert run(module.Own()).mode.failure is None
    # Without the dataclass the file raises, and so does the load.
    file.write_text("raise LookupError('no engine here')")
    failure = run(module.Own()).mode.failure
    assert (failure.stage, failure.error) == ("load", "LookupError: no engine here (test_own_engine.py:1)")


def test_what_cannot_be_pickled_is_refused_before_a_process_starts():
    with pytest.raises(InputError, match="must be picklable; found CountingEngine") as told:
        run(CountingEngine(lambda: None))
    assert "fix: a factory is a function at the top of a module" in str(told.value)

"""Two devices: copies between them, their events, peers and contexts. Each test is a process that has two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def printed(program, **variables):
    """What a program prints where it has two devices."""
    environment = {**os.environ, "CUDA_EMULATOR_DEVICES": "2", **variables}
    begin = "import ctypes, torch; runtime = ctypes.CDLL('libcudart.so.13')\n"
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("seed", [None, "1"])
def test_a_copy_to_the_other_device_changes_types_and_layouts(seed):
    program = """
import cuda_emulator
rows = torch.arange(6., device="cuda:0").view(2, 3)
print(rows.to("cuda:1", torch.float16).tolist(), rows.t().to("cuda:1").tolist())
wide = torch.full((4, 3), -1., device="cuda:1")
wide[::2].copy_(rows)
print(wide.tolist(), torch.zeros(2, 3, device="cuda:1").copy_(rows[0]).tolist())
print((rows + 1j).conj().to("cuda:1").tolist()[0], cuda_emulator.unknown_launches())
"""
    assert printed(program, **({"CUDA_EMULATOR_SEED": seed} if seed else {})).splitlines() == [
        "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]",
        "[[0.0, 1.0, 2.0], [-1.0, -1.0, -1.0], [3.0, 4.0, 5.0], [-1.0, -1.0, -1.0]] [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]",
        "[-1j, (1-1j), (2-1j)] {}",
    ]


def test_events_belong_to_their_device():
    program = """
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
for device, event in enumerate(events):
    with torch.cuda.device(device):
        event.record()
        torch.cuda.synchronize()
try:
    print(events[0].elapsed_time(events[1]))
except RuntimeError as error:
    print(str(error).splitlines()[0])
event = ctypes.c_void_p()
with torch.cuda.device(0):
    runtime.cudaEventCreateWithFlags(ctypes.byref(event), 0)
    print(runtime.cudaEventRecord(event, ctypes.c_void_p(torch.cuda.Stream(1).cuda_stream)))
"""
    assert printed(program).splitlines() == ["CUDA error: invalid resource handle", "400"]


def test_access_to_a_peer_is_enabled_once_and_never_to_itself():
    program = """
torch.ones(1, device="cuda:0")
print([runtime.cudaDeviceEnablePeerAccess(peer, 0) for peer in (1, 1, 0, 5)])
"""
    assert printed(program) == "[0, 704, 101, 101]"


def test_a_wait_for_one_device_leaves_the_capture_of_the_other():
    program = """
rows = torch.ones(3, device="cuda:0")
torch.ones(3, device="cuda:1")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    rows += 1
    torch.cuda.synchronize(1)
graph.replay()
print(rows.tolist())
"""
    assert printed(program) == "[2.0, 2.0, 2.0]"


def test_the_driver_counts_devices_after_its_start_and_a_device_has_a_context_after_its_first_use():
    program = """
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
print(driver.cuDeviceGetCount(ctypes.byref(count)), torch._C._cuda_hasPrimaryContext(0))
print(driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value)
torch.ones(1, device="cuda:1")
print(*map(torch._C._cuda_hasPrimaryContext, range(2)))
"""
    assert printed(program).splitlines() == ["3 False", "0 0 2", "False True"]


def test_two_replays_that_share_a_pool_interleave():
    program = """
import cuda_emulator
wrong = 0
for seed in range(20):
    with cuda_emulator.asynchronous(seed):
        rows, outputs, graphs = torch.ones(64, device="cuda"), [], []
        pool = torch.cuda.graph_pool_handle()
        for factor in (2, 3):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs.append((rows * factor) * 10)
            graphs.append(graph)
            del graph
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        wrong += [output[0].item() for output in outputs] != [20, 30]
print(wrong > 0)
"""
    assert printed(program) == "True"

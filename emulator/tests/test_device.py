"""Torch's own CUDA code computes on the device, and its graphs replay."""

from __future__ import annotations

import cuda_emulator
import torch


def test_torch_sees_the_device_by_its_name():
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == cuda_emulator.DEVICE_NAME


def test_a_capture_computes_nothing_and_a_replay_reads_new_inputs():
    linear = torch.nn.Linear(4, 4).cuda()
    rows = torch.randn(2, 4, device="cuda")
    with torch.no_grad():
        linear(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = linear(rows)
        fresh = torch.randn(2, 4, device="cuda")
        rows.copy_(fresh)
        graph.replay()
        torch.testing.assert_close(output, linear(fresh))


def test_nothing_that_runs_here_is_left_uncomputed():
    before = cuda_emulator.unknown_launches()
    torch.randn(3, 3, device="cuda").softmax(-1).sum().item()
    assert cuda_emulator.unknown_launches() == before

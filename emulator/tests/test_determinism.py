"""`use_deterministic_algorithms` raises where torch's own CUDA code does. That code is asked, without our kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import cuda_emulator
import pytest

PROGRAM = """
import json, sys
from cuda_emulator import preload
if sys.argv[1] == "torch":
    preload._load_operators = lambda: None  # torch's CUDA code stays. Its kernels compute nothing
    preload.adopt_operators = lambda: None
import torch
from torch.nn import functional as F
aten = torch.ops.aten

def of(*sizes, dtype=torch.float32):
    return torch.zeros(*sizes, device="cuda", dtype=dtype)

def index(*sizes):
    return of(*sizes, dtype=torch.long)

def gradient(function, *sizes):
    def call():
        output = function(of(*sizes).requires_grad_())
        output.backward(torch.empty_like(output))
    return call

def ctc(rows):
    lengths = torch.tensor([5]), torch.tensor([2])
    return F.ctc_loss(rows.log_softmax(2), torch.tensor([[1, 2]]).cuda(), *lengths)

def bag(mode):
    return gradient(lambda table: F.embedding_bag(index(1, 2), table, mode=mode), 4, 3)

SIZES = {1: (1, 1, 4), 2: (1, 1, 4, 4), 3: (1, 1, 4, 4, 4)}
calls = {
    "avg_pool2d": gradient(lambda x: F.avg_pool2d(x, 2), *SIZES[2]),
    "avg_pool3d": gradient(lambda x: F.avg_pool3d(x, 2), *SIZES[3]),
    "adaptive_avg_pool2d": gradient(lambda x: F.adaptive_avg_pool2d(x, 2), *SIZES[2]),
    "adaptive_avg_pool3d": gradient(lambda x: F.adaptive_avg_pool3d(x, 2), *SIZES[3]),
    "adaptive_max_pool2d": gradient(lambda x: F.adaptive_max_pool2d(x, 2), *SIZES[2]),
    "adaptive_max_pool3d": gradient(lambda x: F.adaptive_max_pool3d(x, 2), *SIZES[3]),
    "max_pool2d": gradient(lambda x: F.max_pool2d(x, 2), *SIZES[2]),
    "max_pool3d": gradient(lambda x: F.max_pool3d(x, 2), *SIZES[3]),
    "fractional_max_pool2d": gradient(
        lambda x: F.fractional_max_pool2d(x, 2, output_size=2, _random_samples=of(1, 1, 2)), *SIZES[2]),
    "fractional_max_pool3d": gradient(
        lambda x: F.fractional_max_pool3d(x, 2, output_size=2, _random_samples=of(1, 1, 3)), *SIZES[3]),
    "max_unpool2d": lambda: F.max_unpool2d(of(*SIZES[2]), index(*SIZES[2]), 2),
    "max_unpool3d": lambda: F.max_unpool3d(of(*SIZES[3]), index(*SIZES[3]), 2),
    "linear": gradient(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), *SIZES[1]),
    "nearest": gradient(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), *SIZES[2]),
    "bilinear": gradient(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), *SIZES[2]),
    "bicubic": gradient(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), *SIZES[2]),
    "bilinear, antialias": gradient(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), *SIZES[2]),
    "bicubic, antialias": gradient(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), *SIZES[2]),
    "bilinear kernel": lambda: aten.upsample_bilinear2d_backward(
        of(*SIZES[2]), (4, 4), (1, 1, 2, 2), False, None, None),
    "trilinear kernel": lambda: aten.upsample_trilinear3d_backward(
        of(*SIZES[3]), (4, 4, 4), (1, 1, 2, 2, 2), False, None, None, None),
    **{f"{mode}{n}": gradient(lambda x, mode=mode, n=n: F.pad(x, (1, 1) * n, mode), *SIZES[n])
       for mode in ("reflect", "replicate") for n in SIZES},
    "replicate kernel 1": lambda: aten.replication_pad1d_backward(of(1, 1, 6), of(*SIZES[1]), (1, 1)),
    "replicate kernel 2": lambda: aten.replication_pad2d_backward(of(1, 1, 6, 6), of(*SIZES[2]), (1, 1) * 2),
    "replicate kernel 3": lambda: aten.replication_pad3d_backward(of(1, 1, 6, 6, 6), of(*SIZES[3]), (1, 1) * 3),
    **{f"nll_loss2d {kind}": gradient(lambda x, kind=kind: F.nll_loss(x, index(1, 2, 2), reduction=kind), 1, 3, 2, 2)
       for kind in ("none", "mean")},
    **{f"nll_loss2d kernel {kind}": lambda kind=kind: aten.nll_loss2d_backward(
        of(1, 2, 2) if kind == 0 else of(()), of(1, 3, 2, 2), index(1, 2, 2), None, kind, -100, of(()))
       for kind in (0, 1)},
    "nll_loss": gradient(lambda x: F.nll_loss(x, index(2)), 2, 3),
    "ctc_loss": gradient(ctc, 5, 1, 3),
    "ctc_loss alone": lambda: ctc(of(5, 1, 3)),
    "embedding_bag max": bag("max"),
    "put_": lambda: of(4).put_(index(2), of(2)),
    "put_ accumulate": lambda: of(4).put_(index(2), of(2), accumulate=True),
    "histc": lambda: torch.histc(of(4), 4, 0, 3),
    "histc of integers": lambda: torch.histc(of(4, dtype=torch.int32), 4, 0, 3),
    "bincount": lambda: torch.bincount(index(3)),
    "bincount with weights": lambda: torch.bincount(index(3), of(3)),
    "median": lambda: torch.median(of(4)),
    "median with indices": lambda: torch.median(of(2, 4), 0),
    "nanmedian with indices": lambda: torch.nanmedian(of(2, 4), 0),
    "grid_sample2d": gradient(lambda x: F.grid_sample(x, of(1, 2, 2, 2), align_corners=False), *SIZES[2]),
    "grid_sample3d": gradient(lambda x: F.grid_sample(x, of(1, 2, 2, 2, 3), align_corners=False), *SIZES[3]),
    "cumsum": lambda: of(4).cumsum(0),
    "scatter": lambda: of(4).scatter(0, index(2), of(2)),
    "scatter multiply": lambda: of(4).scatter(0, index(2), of(2), reduce="multiply"),
    "scatter_ multiply": lambda: of(4).scatter_(0, index(2), of(2), reduce="multiply"),
    "scatter multiply by a number": lambda: of(4).scatter(0, index(2), 2.0, reduce="multiply"),
    "scatter add": lambda: of(4).scatter(0, index(2), of(2), reduce="add"),
    "scatter_add": lambda: of(4).scatter_add(0, index(2), of(2)),
    **{f"scatter_reduce {kind}": lambda kind=kind: of(4).scatter_reduce(0, index(2), of(2), kind)
       for kind in ("sum", "prod", "amax")},
    "scatter_reduce_": lambda: of(4).scatter_reduce_(0, index(2), of(2), "prod"),
    "index_reduce": lambda: of(4).index_reduce(0, index(2), of(2), "mean"),
    "index_reduce_": lambda: of(4).index_reduce_(0, index(2), of(2), "amax"),
    "index_add": lambda: of(4).index_add(0, index(2), of(2)),
    "index_put": lambda: of(4).index_put((index(2),), of(2), accumulate=True),
    "gather": gradient(lambda x: x.gather(0, index(2)), 4),
    "take": gradient(lambda x: x.take(index(2)), 4),
}
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
alerts = {}
for name, call in calls.items():
    try:
        call()
        alerts[name] = ""
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        alerts[name] = text.partition(" does not have a deterministic")[0] if "does not have a det" in text else ""
print(json.dumps(alerts))
"""


def alerts(whose):
    # Torch's own kernels compute nothing, which is no fault here.
    environment = {name: text for name, text in os.environ.items() if name != cuda_emulator.COUNTS_FOLDER}
    command = [sys.executable, "-c", PROGRAM, whose]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_alerts_are_those_of_torchs_cuda_code():
    ours, theirs = alerts("ours"), alerts("torch")
    assert {name for name, text in theirs.items() if text} >= {"avg_pool3d", "put_", "grid_sample2d"}
    assert ours == theirs


def test_a_program_that_asks_for_warnings_gets_them():
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            torch.zeros(2, device="cuda").put_(torch.zeros(1, dtype=torch.long, device="cuda"), torch.ones(1).cuda())
    finally:
        torch.use_deterministic_algorithms(False)

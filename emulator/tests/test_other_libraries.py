"""Operators of other libraries: a CPU kernel computes where there is a CUDA kernel too, and nothing else changes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import cuda_emulator
import pytest
import torch

SOURCE = """
#include <torch/library.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/empty_like.h>

at::Tensor add_one(const at::Tensor& x) { return at::add(x, 1); }
at::Tensor where_positive(const at::Tensor& x) { return at::nonzero(at::clamp_min(x, 0)).flatten(); }
at::Tensor nothing(const at::Tensor& x) { return at::empty_like(x); }  // a kernel that the device cannot run

TORCH_LIBRARY(emulator_test, library) {
  library.def("add_one(Tensor x) -> Tensor");
  library.def("where_positive(Tensor x) -> Tensor");
  library.def("only_cpu(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(emulator_test, CPU, library) {
  library.impl("add_one", add_one);
  library.impl("where_positive", where_positive);
  library.impl("only_cpu", add_one);
}
TORCH_LIBRARY_IMPL(emulator_test, CUDA, library) {
  library.impl("add_one", nothing);
  library.impl("where_positive", nothing);
}
"""


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    source, library = folder / "operators.cpp", folder / "liboperators.so"
    source.write_text(SOURCE, encoding="utf-8")
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home / 'include'}"]
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", *flags, source, "-o", library, *link], check=True)
    torch.ops.load_library(library)
    return torch.ops.emulator_test


@pytest.fixture
def row():
    return torch.tensor([-1.0, 2.0, 3.0], device="cuda")


def test_the_cpu_kernel_computes_in_a_call_and_in_a_graph(operators, row):
    assert operators.add_one(row).tolist() == [0, 3, 4]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = operators.add_one(row)
    row.fill_(6)
    graph.replay()
    assert output.tolist() == [7, 7, 7]


def test_a_result_whose_size_depends_on_data_is_whole_in_every_order(operators, row):
    for seed in range(5):
        with cuda_emulator.asynchronous(seed):
            assert operators.where_positive(row * 2).tolist() == [1, 2]


def test_an_operator_without_a_cuda_kernel_is_refused_as_on_a_gpu(operators, row):
    with pytest.raises(NotImplementedError, match="'emulator_test::only_cpu' with arguments from the 'CUDA'"):
        operators.only_cpu(row)


def test_a_kernel_in_python_stays(row):
    @torch.library.custom_op("emulator_test_python::f", mutates_args=(), device_types="cpu")
    def on_cpu(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @on_cpu.register_kernel("cuda")
    def on_cuda(x):
        return x + 2

    cuda_emulator.preload.adopt_operators()
    assert on_cpu(row).tolist() == [1, 4, 5]


def test_every_operator_in_the_lists_of_the_device_is_one_of_torchs():
    names = cuda_emulator.preload.operators().cuda_emulator_names_without_operator
    names.restype = ctypes.c_char_p
    assert names().decode().split() == []

"""What holds graphs of its own: refused with the remedy, and usable afterwards as before."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.gpu.small_models import Mlp

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.errors import CaptureRefusal

by_triton = pytest.mark.needs_triton("Inductor compiles for CUDA with Triton")


def needs_a_compiler():
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("Triton needs a C compiler for what it launches kernels with")


@pytest.fixture
def tried(capture):
    """The graph of a call, or the refusal."""

    def tried(model, *args):
        try:
            return capture(model, *args)
        except CaptureRefusal as refusal:
            return refusal

    return tried


@by_triton
@pytest.mark.slow
@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_compiled_code_with_graphs_of_its_own_is_refused_with_the_remedy(backend, capture, how):
    needs_a_compiler()
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False, **how)
    with pytest.raises(CaptureRefusal, match="runs CUDA graphs of its own") as raised:
        capture(compiled, x)
    assert "max-autotune-no-cudagraphs" in raised.value.fix
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(capture(model, x)(x), model(x).detach())


@by_triton
@pytest.mark.slow
def test_compiled_code_without_graphs_is_captured(backend, capture):
    needs_a_compiler()
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    torch._dynamo.reset()
    graph = capture(torch.compile(model, dynamic=False, mode="max-autotune-no-cudagraphs"), x)
    torch.testing.assert_close(graph(x), model(x).detach(), rtol=1e-3, atol=1e-3)


@by_triton
@pytest.mark.slow
@pytest.mark.parametrize("single", [True, False], ids=["single-threaded", "with threads"])
def test_a_package_is_captured_if_loaded_without_threads_and_else_refused_with_the_remedy(
    backend, capture, tried, single, tmp_path
):
    needs_a_compiler()
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++")
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    exported = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path, run_single_threaded=single)
    if single:
        torch.testing.assert_close(capture(package, x)(x), model(x).detach(), rtol=1e-3, atol=1e-3)
        return
    found = tried(package, x)
    if isinstance(found, CaptureRefusal):
        assert "run_single_threaded=True" in found.fix, str(found)
    else:  # a torch whose packages no longer ask events: then its graph must be right
        torch.testing.assert_close(found(x), model(x).detach(), rtol=1e-3, atol=1e-3)


def test_the_replay_of_another_graph_inside_of_the_call_is_refused_or_right(backend, capture, tried):
    x = torch.ones(8, device=backend.device)
    inner = capture(lambda x: x * 3, x)
    outer = tried(lambda x: inner(x) + 1, x)
    if isinstance(outer, CaptureRefusal):
        assert outer.fix or outer.hazard, str(outer)
    else:  # CUDA can take one graph into another
        assert outer(x * 2).eq(7).all()
    assert inner(x * 2).eq(6).all()


def test_a_runner_inside_of_the_call_gives_the_graph_its_own_operations(backend, capture):
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    with GraphRunner(model, x, batch_sizes=(8,), backend=backend) as inner:
        graph = capture(lambda x: inner(x) + 1, x)
        assert inner.statistics.calls == 0
        other = torch.randn_like(x)
        with torch.inference_mode():
            torch.testing.assert_close(graph(other), model(other) + 1)
            torch.testing.assert_close(inner(other), model(other))
    assert graph.receipt.operations == capture(lambda x: model(x) + 1, x).receipt.operations


@by_triton
@pytest.mark.slow
def test_compiled_code_that_has_run_its_graphs_before_is_refused_too(backend, capture):
    needs_a_compiler()
    model, x = Mlp().cuda().eval(), torch.randn(8, 64, device=backend.device)
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    with pytest.raises(CaptureRefusal, match="runs CUDA graphs of its own"):
        capture(compiled, x)


def test_a_live_graph_of_the_program_is_told_that_a_capture_frees_its_workspaces(backend):
    x = torch.ones(8, device=backend.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x + 1
    with backend.pool() as pool, pytest.warns(UserWarning, match="1 CUDA graph of your program: .* capture them again"):
        pool.capture(lambda x: x * 2, (x,), {}, batch_size=8)
    del graph


def test_graphs_of_this_package_and_released_ones_need_no_warning(backend, recwarn):
    x = torch.ones(8, device=backend.device)
    released = torch.cuda.CUDAGraph()
    with torch.cuda.graph(released):
        x + 1
    released.reset()
    with backend.pool() as pool, backend.pool() as another:
        pool.capture(lambda x: x * 2, (x,), {}, batch_size=8)
        another.capture(lambda x: x * 3, (x,), {}, batch_size=8)
    assert [str(each.message) for each in recwarn if "of your program" in str(each.message)] == []

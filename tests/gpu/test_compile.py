"""Compiled code inside graphs: that it is compiled, that it runs, that replays run its kernels."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.gpu.profiled import device_work, wake_profiler
from tests.gpu.small_models import Mlp

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.values import Agreement

TIME_LIMIT_S = 240

pytestmark = pytest.mark.slow
by_triton = pytest.mark.needs_triton("Inductor compiles for CUDA with Triton")


@pytest.fixture
def compiled(backend, examples, tmp_path):
    """Compile a small model for two batch sizes; with AOTInductor a C++ compiler is needed too."""

    def make(mode):
        if shutil.which("gcc") is None and shutil.which("cc") is None:
            pytest.skip("Triton needs a C compiler for what it launches kernels with")
        if mode == "aot" and shutil.which("g++") is None:
            pytest.skip("AOTInductor needs g++")
        model, rows = Mlp().cuda().eval(), examples(2, 8)
        return model, rows, compile_model(model, rows, mode, backend, cache_dir=tmp_path, time_limit_s=TIME_LIMIT_S)

    return make


@by_triton
@pytest.mark.parametrize("mode", ["inductor", "aot"])
def test_compiled_code_is_captured_proved_to_run_and_agrees_with_eager(backend, pool, compiled, mode, tmp_path):
    wake_profiler(tmp_path)
    model, rows, code = compiled(mode)
    with code:
        ran = {size: code.executions(size) for size in rows}
        captures = capture_batches(code.call_for, rows, pool, model=model, backend=backend, executions=code.executions)
        assert captures.refused is None
        for size, graph in captures.graphs.items():
            assert code.regions(size) >= 1
            assert code.executions(size) > ran[size]
            assert graph.receipt.kernels is None or graph.receipt.kernels > 0
            graph.replay()
            seen = device_work(graph.replay, tmp_path)
            assert any("triton" in name for name in seen), seen
        replayed = {size: code.executions(size) for size in rows}
        found = check_replays(captures.graphs, lambda _: model, rows, model=model, backend=backend, seed=1)
        assert all(isinstance(each, Agreement) for each in found.values()), found
        assert {size: code.executions(size) for size in rows} == replayed, "a replay has called the compiled code"


@by_triton
def test_a_compiled_graph_has_fewer_kernels_than_the_eager_one(backend, pool, compiled):
    model, rows, code = compiled("inductor")
    with code:
        plain = pool.capture(model, rows[8].args, {}, batch_size=8).receipt.kernels
        fused = pool.capture(code.call_for(8), rows[8].args, {}, batch_size=8).receipt.kernels
    if plain is None:
        pytest.skip("nothing counts the nodes of a graph here")
    assert fused < plain


@by_triton
def test_a_package_comes_from_the_cache_the_second_time(backend, examples, compiled, tmp_path):
    model, rows, first = compiled("aot")
    second = compile_model(model, rows, "aot", backend, cache_dir=tmp_path, time_limit_s=TIME_LIMIT_S)
    with first, second:
        assert any("package from cache" in note for note in second.notes), second.notes
        with torch.inference_mode():
            torch.testing.assert_close(second.call_for(8)(*rows[8].args), model(*rows[8].args))


def test_compiled_code_that_falls_back_to_eager_is_refused(backend, pool, examples):
    model, rows = Mlp().cuda().eval(), examples(4)
    captures = capture_batches(lambda _: model, rows, pool, model=model, backend=backend, executions=lambda _: 7)
    assert captures.refused is not None
    assert "went to eager code instead" in captures.refused.text

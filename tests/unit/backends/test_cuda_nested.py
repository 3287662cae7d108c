"""Graphs inside of a call that is to be captured: compiled code with its own, packages with threads, other replays."""

import sys
import threading
from types import ModuleType

import pytest
from tests.fake_cuda import FakeTreeManager

from pytest_cudagraph.backends.cuda.recording import no_graphs_inside
from pytest_cudagraph.backends.cuda.refusals import refusal_of
from pytest_cudagraph.errors import CaptureRefusal

pytestmark = pytest.mark.usefixtures("no_collections")

TREES = "torch._inductor.cudagraph_trees"


@pytest.fixture
def trees(monkeypatch):
    module = ModuleType(TREES)
    module.CUDAGraphTreeManager = type("CUDAGraphTreeManager", (FakeTreeManager,), {"_run": FakeTreeManager._run})
    monkeypatch.setitem(sys.modules, TREES, module)
    return module


def calls_compiled_code(manager):
    bound = manager.run  # before anything is watched, as compiled code does

    def model(x):
        return bound(x, 0)

    return model


def test_compiled_code_with_graphs_of_its_own_is_refused_at_the_users_line_with_the_remedy(cuda, capture, trees):
    model = calls_compiled_code(trees.CUDAGraphTreeManager())
    with pytest.raises(CaptureRefusal) as raised:
        capture(model)
    refusal = raised.value
    assert refusal.text == "compiled code inside the call runs CUDA graphs of its own"
    assert refusal.fix == (
        'compile without them: use the default mode or mode="max-autotune-no-cudagraphs", '
        "and turn torch._inductor.config.triton.cudagraphs off"
    )
    assert refusal.site.line == model.__code__.co_firstlineno + 1
    assert "capture_begin" not in cuda.names()


def test_afterwards_compiled_code_runs_its_graphs_as_before(capture, trees):
    manager = trees.CUDAGraphTreeManager()
    with pytest.raises(CaptureRefusal):
        capture(calls_compiled_code(manager))
    assert manager.run(1, 0) == 2
    assert trees.CUDAGraphTreeManager._run is FakeTreeManager._run


def test_code_that_loads_graph_trees_with_its_first_call_is_refused_at_the_second(cuda, capture, monkeypatch, trees):
    monkeypatch.delitem(sys.modules, TREES)
    manager = trees.CUDAGraphTreeManager()
    calls = []

    def model(x):
        calls.append(1)
        sys.modules[TREES] = trees
        return manager.run(x, 0)

    with pytest.raises(CaptureRefusal, match="graphs of its own"):
        capture(model)
    assert len(calls) == 2
    assert "capture_begin" not in cuda.names()


def test_other_threads_may_run_their_graphs_meanwhile(trees):
    manager, seen = trees.CUDAGraphTreeManager(), []
    with no_graphs_inside():
        thread = threading.Thread(target=lambda: seen.append(manager.run(1, 0)))
        thread.start()
        thread.join()
    assert seen == [2]


def test_without_compiled_graphs_nothing_is_touched(capture, monkeypatch):
    monkeypatch.delitem(sys.modules, TREES, raising=False)
    assert capture(lambda x: x + 1).replay().tolist() == [2.0, 2.0]
    assert TREES not in sys.modules


def test_torch_has_what_is_watched():
    trees = pytest.importorskip(TREES)
    assert "_run" in vars(trees.CUDAGraphTreeManager)
    assert "_run" in trees.CUDAGraphTreeManager.run.__code__.co_names


class AOTICompiledModel:
    """Named as torch's own class, which the traceback is searched for."""

    def __call__(self, x):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_package_that_was_loaded_with_threads_is_refused_with_the_remedy(cuda, capture):
    package = AOTICompiledModel()

    def model(x):
        if cuda.capturing:
            cuda.is_invalidated = True
            return package(x)
        return x + 1

    with pytest.raises(CaptureRefusal) as raised:
        capture(model)
    assert raised.value.text == "operation not permitted when stream is capturing"
    assert raised.value.hazard == ""
    assert raised.value.fix == (
        "load the package with torch._inductor.aoti_load_package(path, run_single_threaded=True); "
        "if it was, the model in it waits for the device"
    )


def test_torch_names_its_packages_so():
    package = pytest.importorskip("torch._inductor.package.package")
    assert package.AOTICompiledModel.__name__ == "AOTICompiledModel"


def test_the_replay_of_another_graph_inside_of_the_call_is_refused_with_the_remedy():
    refusal = refusal_of(RuntimeError("Cannot prepare for replay during capturing stage. Current cudaStreamCapture..."))
    assert refusal.hazard == "nested-graph"

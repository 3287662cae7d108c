"""Several models in one compiler: found again, let go, served from several threads, cleaned up."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import GraphRunner, InputError, IntegratedAOTCompiler, OptimizedModel, create_integrated_compiler


@pytest.fixture
def compiler():
    with create_integrated_compiler(batch_sizes=(1, 2)) as made:
        yield made


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 2).eval()


def compile_eagerly(compiler, model, config=None):
    return compiler.compile_model_aot(model, (torch.ones(2, 3),), config, "none")


def test_each_model_gives_its_own_answers(compiler, eager):
    models = [linear(seed) for seed in range(3)]
    handles = [compile_eagerly(compiler, model) for model in models]
    x = torch.randn(2, 3)
    for model, handle in zip(models, handles, strict=True):
        assert torch.equal(compiler.try_optimized_inference(model, x).output, eager(model, x))
        assert torch.equal(handle(x), eager(model, x))
    assert [found.paths for found in compiler.statistics().models] == [{"graph": 2}] * 3


def test_the_same_request_is_compiled_once_and_another_one_stands_beside_it(compiler):
    model = linear(0)
    compile_eagerly(compiler, model, {"layers": 1})
    compile_eagerly(compiler, model, {"layers": 1})
    assert len(compiler.statistics().models) == 1
    other = compile_eagerly(compiler, model, {"layers": 2})
    assert len(compiler.statistics().models) == 2
    compiler.try_optimized_inference(model, torch.ones(2, 3))
    assert other.statistics().calls == 1
    compile_eagerly(compiler, model, {"layers": 1})
    compiler.try_optimized_inference(model, torch.ones(2, 3))
    assert other.statistics().calls == 1


def test_a_model_is_found_by_itself_by_its_handle_and_by_its_name(compiler):
    class Bound(nn.Linear):
        def score(self, x):
            return self(x)

    model = Bound(3, 2).eval()
    handle = compile_eagerly(compiler, model, {"model_name": "scorer"})
    method = compile_eagerly(compiler, model.score, {"model_name": "method"})
    for asked in (model, handle, "scorer", model.score):
        assert compiler.try_optimized_inference(asked, torch.ones(2, 3)).path == "graph"
    assert handle.statistics().calls == 3
    assert method.statistics().calls == 1
    assert compile_eagerly(compiler, handle, {"model_name": "scorer"}).original is model
    with pytest.raises(InputError) as caught:
        compiler.try_optimized_inference("ranker", torch.ones(2, 3))
    assert str(caught.value) == "no model is named 'ranker'; there are: method, scorer"


def test_a_model_of_no_compile_runs_eager_and_is_counted(compiler, eager, caplog):
    model, x = linear(0), torch.ones(2, 3)
    for _ in range(2):
        result = compiler.try_optimized_inference(model, x)
        assert (result.path, result.reason) == ("eager", "not a model of this compiler")
        assert torch.equal(result.output, eager(model, x))
    assert compiler.statistics().unknown == compiler.statistics().calls == 2
    assert [record.getMessage() for record in caplog.records] == [
        "other models: a call runs eager: not a model of this compiler (logged once, then only counted)"
    ]


@pytest.mark.parametrize("mode", ["none", "default"])
def test_a_dead_model_is_not_kept_alive(compiler, fake_compiler, mode):
    model = linear(0)
    compiler.compile_model_aot(model, (torch.ones(2, 3),), None, mode)
    assert compiler.try_optimized_inference(model, torch.ones(2, 3)).path == "graph"
    dead, memory = weakref.ref(model), StorageWeakRef(model.weight.untyped_storage())
    del model
    gc.collect()
    assert dead() is None
    assert compiler.statistics().models == ()
    gc.collect()
    assert memory.expired()


def test_the_graphs_of_a_dead_model_are_closed_by_the_next_call_of_the_compiler(compiler, monkeypatch):
    closed, close = [], GraphRunner.close
    monkeypatch.setattr(GraphRunner, "close", lambda run: closed.append(1) or close(run))
    model = linear(0)
    compile_eagerly(compiler, model)
    del model
    gc.collect()
    assert not closed
    compiler.try_optimized_inference(torch.sin, torch.ones(1))
    assert closed


def test_a_handle_keeps_its_model_and_its_graphs(compiler):
    handle = compile_eagerly(compiler, linear(0))
    gc.collect()
    assert handle.infer(torch.ones(2, 3)).path == "graph"
    assert len(compiler.statistics().models) == 1


def test_after_cleanup_every_call_runs_eager_and_says_so(compiler, eager, caplog):
    model, x = linear(0), torch.ones(2, 3)
    handle = compile_eagerly(compiler, model, "tiny")
    handle(x)
    compiler.cleanup()
    compiler.cleanup()
    late = compile_eagerly(compiler, model, "late")
    for result in (handle.infer(x), late.infer(x), compiler.try_optimized_inference("tiny", x)):
        assert (result.path, result.reason) == ("eager", "cleaned up")
        assert torch.equal(result.output, eager(model, x))
        assert result.output.is_inference()
    early, later = compiler.statistics().models
    assert (early.paths, early.memory_bytes) == ({"graph": 1, "eager": 2}, {})
    assert (later.name, later.paths) == ("late", {"eager": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: a call runs eager: cleaned up (logged once, then only counted)",
        "late: a call runs eager: cleaned up (logged once, then only counted)",
    ]


def test_cleanup_releases_the_weights(compiler):
    model = linear(0)
    memory = StorageWeakRef(model.weight.untyped_storage())
    handle = compile_eagerly(compiler, model)
    compiler.cleanup()
    del model, handle
    gc.collect()
    assert memory.expired()


def test_packages_without_a_cache_folder_are_gone_after_cleanup(fake_compiler):
    compiler = create_integrated_compiler(batch_sizes=(2,))
    compiler.compile_model_aot(linear(0), (torch.ones(2, 3),), {"a": 1}, "aot")
    compiler.compile_model_aot(linear(0), (torch.ones(2, 3),), {"a": 2}, "aot")
    one, other = fake_compiler.folders
    assert one.parent == other.parent
    assert one != other
    assert one.parent.is_dir()
    compiler.cleanup()
    assert not one.parent.exists()


def test_settings_choose_the_folder_of_the_cache(fake_compiler, tmp_path):
    compiler = create_integrated_compiler(batch_sizes=(2,), cache_dir=str(tmp_path))
    for settings in ({"a": 1}, {"a": 2}, {"a": 1, "b": object()}, {"a": 1, "b": object()}):
        compiler.compile_model_aot(linear(0), (torch.ones(2, 3),), settings, "aot")
    first, second, third, fourth = fake_compiler.folders
    assert len({first, second, third}) == 3
    assert third == fourth
    assert first.parent == tmp_path


def test_threads_get_their_own_answers(compiler, eager):
    models, errors = [linear(0), linear(1)], []
    barrier = threading.Barrier(4)

    def work(number):
        source = torch.Generator().manual_seed(number)
        barrier.wait()
        try:
            for call in range(20):
                model, x = models[(number + call) % 2], torch.randn(1 + call % 3, 3, generator=source)
                compile_eagerly(compiler, model)
                torch.testing.assert_close(compiler.try_optimized_inference(model, x).output, eager(model, x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(compiler.statistics().models) == 2
    assert compiler.statistics().calls == 80


def test_the_factory_makes_what_the_class_makes():
    with create_integrated_compiler() as made:
        assert type(made) is IntegratedAOTCompiler


def test_a_handle_stands_for_its_model(compiler):
    model = linear(0)
    handle = compile_eagerly(compiler, model, {"model_id": "tiny"})
    assert type(handle) is OptimizedModel
    assert repr(handle) == "OptimizedModel('tiny', mode='none')"
    assert handle.weight is model.weight
    assert handle.eval() is handle
    assert handle.to(torch.float32) is handle
    assert not handle.training
    assert handle.train().training
    with pytest.raises(AttributeError, match="has no attribute 'generate'"):
        _ = handle.generate

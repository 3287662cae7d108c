"""What the stage promises in every mode."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph.compile import compile_model
from pytest_cudagraph.errors import CompileTimeout, CudagraphError, InputError
from pytest_cudagraph.inputs import Example


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls.add_(1)
        return {"y": torch.relu(self.linear(x)) * scale}


class Broken(Small):
    """A graph on either side of a break."""

    def forward(self, x):
        before = torch.relu(self.linear(x))
        torch._dynamo.graph_break()
        return torch.tanh(before + x)


class Counting(Small):
    """Compiles its own counter in, so that no call can reuse the code of another one."""

    count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


class Disabled(Small):
    forward = torch.compiler.disable(Small.forward)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_mode_none_hands_the_model_back_and_counts_nothing(backend, examples, tmp_path):
    model = Small()
    compiled = compile_model(model, examples(1, 2), "none", backend, cache_dir=tmp_path)
    assert compiled.call_for(1) is model
    assert compiled.compile_ns == {1: 0, 2: 0}
    assert (compiled.mode, compiled.notes, compiled.executions(2), compiled.regions(2)) == ("none", (), None, None)
    assert float(model.calls) == 0


def test_an_unknown_batch_size_is_named_with_those_there_are(backend, examples, tmp_path):
    compiled = compile_model(Small(), examples(1, 2), "none", backend, cache_dir=tmp_path)
    with pytest.raises(InputError) as raised:
        compiled.call_for(3)
    assert str(raised.value) == "the model is not compiled for batch 3, only for: 1, 2"


def test_closing_releases_the_compiled_code_and_may_be_repeated(backend, examples, tmp_path):
    with compile_model(Small(), examples(1), "none", backend, cache_dir=tmp_path) as compiled:
        pass
    compiled.close()
    with pytest.raises(InputError, match=r"only for: none \(closed\)"):
        compiled.call_for(1)


@pytest.mark.parametrize("mode", ["none", "inductor", "aot"])
@pytest.mark.parametrize("compiled_by", [torch.compile, lambda model: model.compile() or model], ids=["call", "method"])
def test_a_model_that_is_compiled_already_is_refused(mode, compiled_by, backend, examples, tmp_path):
    with pytest.raises(CudagraphError) as raised:
        compile_model(compiled_by(Small()), examples(1), mode, backend, cache_dir=tmp_path)
    assert str(raised.value) == (
        "the model is already compiled, but the audit needs the eager operations\n"
        "  to fix: pass the eager module and use compile='inductor'"
    )


def test_a_compiled_function_is_refused(backend, examples, tmp_path):
    with pytest.raises(CudagraphError, match="already compiled"):
        compile_model(torch.compile(torch.relu), examples(1), "inductor", backend, cache_dir=tmp_path)


def test_every_graph_becomes_a_region_and_every_batch_size_its_own(backend, examples, tmp_path, interpreted):
    model, inputs = Broken().eval(), examples(2, 3)
    compiled = compile_model(model, inputs, "inductor", backend, cache_dir=tmp_path)
    # Two graphs, each for tensors made in inference mode and for others.
    assert (compiled.regions(2), compiled.regions(3)) == (4, 4)
    assert backend.regions[0].label == "inductor batch 2 region 1"
    before = compiled.executions(2), compiled.executions(3)
    with backend.running():
        found = compiled.call_for(2)(*inputs[2].args)
        torch.testing.assert_close(found, model(*inputs[2].args))
    assert (compiled.executions(2), compiled.executions(3)) == (before[0] + 2, before[1])
    assert compiled.compile_ns[2] > 0


def test_more_code_than_the_recompile_limit_allows_still_runs_compiled(backend, examples, tmp_path, interpreted):
    inputs = examples(2, 3, 4, 5, 6)  # twice each: with tensors made in inference mode, and with others
    compiled = compile_model(Broken().eval(), inputs, "inductor", backend, cache_dir=tmp_path)
    regions = len(backend.regions)
    for size, example in inputs.items():
        before = compiled.executions(size)
        with backend.running():
            compiled.call_for(size)(*example.args)
        assert compiled.executions(size) == before + 2
    assert len(backend.regions) == regions


def test_two_models_of_one_class_run_their_own_weights(backend, examples, tmp_path, interpreted):
    inputs = examples(2)
    for _ in range(2):
        model = Small().eval()
        compiled = compile_model(model, inputs, "inductor", backend, cache_dir=tmp_path)
        with backend.running():
            torch.testing.assert_close(compiled.call_for(2)(*inputs[2].args), model(*inputs[2].args))


def test_a_plain_callable_compiles(backend, examples, tmp_path, interpreted):
    inputs = examples(2)
    call = functools.partial(torch.nn.functional.softmax, dim=-1)
    compiled = compile_model(call, inputs, "inductor", backend, cache_dir=tmp_path)
    with backend.running():
        torch.testing.assert_close(compiled.call_for(2)(*inputs[2].args), call(*inputs[2].args))


def test_the_examples_stay_as_they_are(backend, tmp_path, interpreted):
    example = Example(args=(torch.ones(2, 4),), kwargs={})
    compile_model(lambda x: x.add_(1), {2: example}, "inductor", backend, cache_dir=tmp_path)
    assert example.args[0].eq(1).all()


def test_code_skipped_for_ever_is_noticed(backend, examples, tmp_path, interpreted):
    class Spoiled(Broken):
        def forward(self, x):
            torch._dynamo.graph_break()
            return torch.relu(self.linear(x))

    inputs = examples(2)
    with backend.running():
        spoiled = torch.compile(Spoiled(), backend="eager")
        with Watching():
            spoiled(*inputs[2].args)
    try:
        with pytest.raises(CudagraphError) as raised:
            compile_model(Spoiled(), inputs, "inductor", backend, cache_dir=tmp_path)
    finally:
        torch._dynamo.reset()
    assert str(raised.value).startswith("compile='inductor' failed at batch 2: nothing of the model was compiled: ")
    assert "torch._dynamo.reset()" in str(raised.value)


def test_a_model_without_a_graph_is_refused_whole(backend, examples, tmp_path, interpreted, golden):
    with pytest.raises(CudagraphError) as raised:
        compile_model(Disabled(), examples(2), "inductor", backend, cache_dir=tmp_path)
    golden("compile-nothing.txt", str(raised.value))


def test_a_switched_off_compiler_is_named(backend, examples, tmp_path, interpreted, monkeypatch):
    from torch._dynamo import config

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with config.patch(disable=True), pytest.raises(CudagraphError, match="TORCHDYNAMO_DISABLE is set"):
        compile_model(Small(), examples(2), "inductor", backend, cache_dir=tmp_path)


def test_a_model_that_compiles_at_every_call_is_refused(backend, examples, tmp_path, interpreted, golden):
    with pytest.raises(CudagraphError) as raised:
        compile_model(Counting(), examples(2), "inductor", backend, cache_dir=tmp_path)
    golden("compile-every-call.txt", str(raised.value))


@pytest.mark.parametrize("mode", ["inductor", "aot"])
def test_a_failed_compile_names_mode_batch_cause_and_the_way_out(mode, backend, examples, tmp_path, monkeypatch):
    from torch._inductor import compile_fx

    from pytest_cudagraph.compile import aot

    def fail(*args, **kwargs):
        raise RuntimeError("no compiler found\nsecond line")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    monkeypatch.setattr(aot, "build", fail)
    with pytest.raises(CudagraphError) as raised:
        compile_model(Small(), examples(2), mode, backend, cache_dir=tmp_path)
    assert str(raised.value) == (
        f"compile={mode!r} failed at batch 2: RuntimeError: no compiler found\n  to continue without: compile='none'"
    )
    assert raised.value.__cause__ is not None


def test_a_package_runs_on_the_arguments_it_was_compiled_for(backend, tmp_path, packaged_as_exported):
    model = Small().eval()
    inputs = {2: Example(args=(torch.randn(2, 4),), kwargs={"scale": 2.0})}
    compiled = compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    with backend.running():
        found = compiled.call_for(2)(*inputs[2].args, scale=2.0)
        torch.testing.assert_close(found, model(*inputs[2].args, scale=2.0))
        with pytest.raises(InputError, match=r"kwargs\['scale'\]: the package is compiled for 2.0, found 3.0"):
            compiled.call_for(2)(*inputs[2].args, scale=3.0)
    # Two calls to settle, one above: the refused one never reached the package.
    assert (compiled.regions(2), compiled.executions(2)) == (1, 3)
    assert compiled.notes == (
        "batch 2: the package holds its own weights and buffers: it does not see later in-place updates",
    )


def test_a_package_is_built_once_for_equal_content(backend, examples, tmp_path, packaged_as_exported):
    model, inputs = Small().eval(), examples(2)
    compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    again = compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    assert len(packaged_as_exported) == 1
    assert "batch 2: package from cache" in again.notes
    with torch.no_grad():
        model.linear.weight.add_(1)
    changed = compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    assert len(packaged_as_exported) == 2
    with backend.running():
        torch.testing.assert_close(changed.call_for(2)(*inputs[2].args), model(*inputs[2].args))


def test_a_damaged_package_is_rebuilt_and_said_so(backend, examples, tmp_path, packaged_as_exported):
    model, inputs = Small().eval(), examples(2)
    compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    (package,) = (tmp_path / "aot").glob("*.pt2")
    package.write_bytes(package.read_bytes()[:-1])
    again = compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    assert len(packaged_as_exported) == 2
    assert "batch 2: the cached package was damaged and has been rebuilt" in again.notes
    assert "batch 2: package from cache" in compile_model(model, inputs, "aot", backend, cache_dir=tmp_path).notes


def test_a_whole_package_that_does_not_load_is_rebuilt(backend, examples, tmp_path, packaged_as_exported, monkeypatch):
    from pytest_cudagraph.compile import aot

    model, inputs = Small().eval(), examples(2)
    compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    load, refused = aot.load, []

    def refuse_once(package, device):
        if not refused:
            refused.append(package)
            raise RuntimeError("symbol not found")
        return load(package, device)

    monkeypatch.setattr(aot, "load", refuse_once)
    again = compile_model(model, inputs, "aot", backend, cache_dir=tmp_path)
    assert (len(refused), len(packaged_as_exported)) == (1, 2)
    assert "batch 2: the cached package was damaged and has been rebuilt" in again.notes


def test_packages_of_a_torch_that_cannot_capture_them_are_refused_on_cuda(backend, examples, tmp_path, monkeypatch):
    backend.kind = "cuda"
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: None)
    with pytest.raises(CudagraphError, match=r"compile='aot' on CUDA needs torch 2.7 or newer, found "):
        compile_model(Small(), examples(2), "aot", backend, cache_dir=tmp_path)


def test_an_output_that_no_package_can_hold_is_named(backend, examples, tmp_path, packaged_as_exported, golden):
    def call(x):
        return {"y": x + 1, "cache": object()}

    with pytest.raises(CudagraphError) as raised:
        compile_model(call, examples(2), "aot", backend, cache_dir=tmp_path)
    golden("compile-opaque-output.txt", str(raised.value))


def test_the_limit_holds_for_all_batch_sizes_together(backend, examples, tmp_path, interpreted):
    with pytest.raises(CompileTimeout) as raised:
        compile_model(Small(), examples(2, 3), "inductor", backend, cache_dir=tmp_path, time_limit_s=0.0)
    assert str(raised.value).startswith("compile='inductor' was stopped at batch 2 after ")
    assert "the limit for all batch sizes of a model together is 0 ms" in str(raised.value)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a POSIX interval timer")
def test_a_compiler_that_never_ends_is_stopped_and_the_next_compile_works(backend, examples, tmp_path, monkeypatch):
    from torch._inductor import compile_fx

    read, write = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx_inner", lambda *args, **options: os.read(read, 1))
        with pytest.raises(CompileTimeout, match="compile='inductor' was stopped at batch 2 after "):
            compile_model(Broken(), examples(2), "inductor", backend, cache_dir=tmp_path, time_limit_s=0.5)
    os.close(read)
    os.close(write)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda graph, inputs, **options: lambda given: graph(*given))
    assert compile_model(Broken(), examples(2), "inductor", backend, cache_dir=tmp_path).executions(2)


def test_a_package_that_takes_too_long_is_a_timeout(backend, examples, tmp_path, packaged_as_exported, monkeypatch):
    from pytest_cudagraph.compile import aot

    def late(program, folder, settings, timeout_s):
        raise TimeoutError("not packaged within 600 s")

    monkeypatch.setattr(aot, "build", late)
    with pytest.raises(CompileTimeout, match="compile='aot' was stopped at batch 2 after "):
        compile_model(Small(), examples(2), "aot", backend, cache_dir=tmp_path)

"""What serves a call: a graph, compiled code, or the model itself, and why; on the CPU twin."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from pytest_cudagraph import CompileTimeout, CudagraphError, InferenceResult, create_integrated_compiler

LOG = "pytest_cudagraph.serving"


def compiler(**options):
    options.setdefault("batch_sizes", (2, 4))
    return create_integrated_compiler(**options)


def path_of(result):
    return result.path, result.reason


@pytest.mark.parametrize("rows", [2, 3, 4], ids=["exact", "padded", "largest"])
def test_a_graph_serves_what_it_was_captured_for(model, eager, rows):
    made, x = compiler(), torch.randn(rows, 3)
    served = made.compile_model_aot(model, (torch.randn(2, 3),), {}, "none")
    result = made.try_optimized_inference(model, x)
    assert type(result) is InferenceResult
    assert path_of(result) == ("graph", "")
    torch.testing.assert_close(result.output, eager(model, x))
    torch.testing.assert_close(served(x), eager(model, x))
    assert served.statistics().paths == {"graph": 2}


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(5, 3), "beyond the largest batch size"),
        (torch.ones(0, 3), "no rows"),
        (torch.ones(2, 2, 3), "other shape or dtype"),
    ],
)
def test_what_no_graph_fits_is_the_models_own_answer_and_the_reason_is_counted(model, eager, x, reason):
    served = compiler().compile_model_aot(model, (torch.randn(2, 3),), {}, "none")
    result = served.infer(x)
    assert path_of(result) == ("eager", reason)
    assert torch.equal(result.output, eager(model, x))
    assert served.statistics().reasons == {reason: 1}


def test_other_keyword_arguments_run_eager_and_are_counted():
    served = compiler().compile_model_aot(lambda x, factor=2: x * factor, (torch.randn(2, 3),), {}, "none")
    assert path_of(served.infer(torch.ones(2, 3), factor=3)) == ("eager", "other argument")
    assert served(torch.ones(2, 3), factor=3).tolist() == [[3.0] * 3] * 2
    assert path_of(served.infer(torch.ones(2, 3))) == ("graph", "")
    assert served.statistics().reasons == {"other argument": 2}


def test_keyword_examples_are_a_mapping_and_one_tensor_is_one_argument():
    made = compiler()
    named = made.compile_model_aot(
        lambda *, x, mask: x * mask, {"x": torch.ones(2, 3), "mask": torch.ones(2, 1)}, None, "none"
    )
    alone = made.compile_model_aot(torch.sin, torch.ones(2, 3), None, "none")
    assert path_of(alone.infer(torch.ones(4, 3))) == ("graph", "")
    assert named(x=torch.full((1, 3), 2.0), mask=torch.ones(1, 1)).tolist() == [[2.0] * 3]


class Reading(nn.Module):
    """Reads a value from the device, which no capture allows."""

    def forward(self, x):
        return x * x.sum().item()


def test_a_refused_capture_runs_eager_says_why_once_and_is_counted(caplog):
    served = compiler().compile_model_aot(Reading(), (torch.ones(2, 3),), {"model_name": "reading"}, "none")
    x = torch.ones(2, 3)
    for _ in range(3):
        assert path_of(served.infer(x)) == ("eager", "capture refused")
    assert served(x).tolist() == [[6.0] * 3] * 2
    found = served.statistics()
    assert found.reasons == {"capture refused": 4}
    assert [note.partition(":")[0] for note in found.notes] == ["not captured", "not captured"]
    said = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert said == [
        f"reading: {found.notes[0]}",
        f"reading: {found.notes[1]}",
        "reading: a call runs eager: capture refused (logged once, then only counted)",
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "batch 4: " in found.notes[0] or "batch 4: " in found.notes[1]


class Counting(nn.Module):
    """Counts its calls in Python, which a replay never sees: the second replay is wrong."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        return x * self.steps


def test_a_graph_that_differs_from_eager_serves_no_call():
    model = Counting()
    served = compiler().compile_model_aot(model, (torch.ones(2, 3),), {}, "none")
    assert model.steps == 0
    assert [served(torch.ones(2, 3))[0, 0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert served.statistics().reasons == {"capture refused": 3}
    assert "differs from eager" in served.statistics().notes[0]


class Anchored(nn.Module):
    """A cache for the batch size of the last call, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.zeros(1, 1))

    def forward(self, x):
        if self.anchors.shape[0] != x.shape[0]:
            self.anchors = torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]
        return x + self.anchors


def test_a_cache_for_one_batch_size_does_not_refuse_the_graphs():
    served = compiler().compile_model_aot(Anchored(), (torch.ones(2, 3),), {}, "none")
    assert [served(torch.zeros(rows, 3))[:, 0].tolist() for rows in (4, 2, 4)] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert served.statistics().paths == {"graph": 3}


def test_a_batch_size_the_model_cannot_take_does_not_stop_the_others():
    served = compiler().compile_model_aot(lambda x: x.view(2, 3) + 1, (torch.ones(2, 3),), {}, "none")
    assert path_of(served.infer(torch.ones(2, 3))) == ("graph", "")
    assert served.statistics().notes[0] == (
        "not captured: batch 4: RuntimeError: shape '[2, 3]' is invalid for input of size 12"
    )


def test_a_batch_size_the_model_cannot_take_does_not_stop_the_compile_of_others(fake_compiler):
    served = compiler(enable_cuda_graphs=False).compile_model_aot(lambda x: x.view(2, 3) + 1, (torch.ones(2, 3),))
    assert served.infer(torch.ones(2, 3)).path == "compiled"
    assert served.statistics().notes == (
        "compiled code not used: batch 4: "
        "the model raises RuntimeError: shape '[2, 3]' is invalid for input of size 12",
    )


def test_a_model_whose_rows_depend_on_each_other_is_not_padded(eager):
    def centred(x):
        return x - x.mean(0)

    served = compiler().compile_model_aot(centred, (torch.randn(2, 3),), {}, "none")
    x = torch.randn(3, 3)
    result = served.infer(x)
    assert result.path == "eager"
    assert torch.equal(result.output, centred(x))
    (note,) = served.statistics().notes
    assert note.startswith("not padded: ")


def test_without_graphs_and_compile_there_is_only_eager(model, eager):
    served = compiler(enable_cuda_graphs=False).compile_model_aot(model, (torch.randn(2, 3),), {}, "none")
    x = torch.randn(2, 3)
    result = served.infer(x)
    assert path_of(result) == ("eager", "graphs are switched off")
    assert torch.equal(result.output, eager(model, x))


def test_without_graphs_compiled_code_serves_its_batch_sizes(model, eager, fake_compiler):
    served = compiler(enable_cuda_graphs=False).compile_model_aot(model, (torch.randn(2, 3),))
    for rows, path in ((2, "compiled"), (4, "compiled"), (3, "eager"), (5, "eager")):
        result = served.infer(torch.ones(rows, 3))
        assert path_of(result) == (path, "graphs are switched off")
        assert torch.equal(result.output, eager(model, torch.ones(rows, 3)))
    assert fake_compiler.modes == ["inductor"]
    assert served.statistics().compiled_sizes == (2, 4)


def test_graphs_are_captured_from_compiled_code(model, fake_compiler):
    calls = []
    fake_compiler.make = lambda model: lambda x: calls.append(1) or model(x)
    served = compiler().compile_model_aot(model, (torch.randn(2, 3),))
    made = len(calls)
    assert path_of(served.infer(torch.randn(2, 3))) == ("graph", "")
    assert path_of(served.infer(torch.randn(1, 3))) == ("graph", "")
    assert len(calls) == made > 0


def test_compiled_code_serves_where_the_capture_is_refused(fake_compiler):
    served = compiler().compile_model_aot(Reading(), (torch.ones(2, 3),))
    assert path_of(served.infer(torch.ones(2, 3))) == ("compiled", "capture refused")
    assert path_of(served.infer(torch.ones(1, 3))) == ("eager", "capture refused")


def test_compiled_code_does_not_serve_another_autocast(model, fake_compiler):
    served = compiler(enable_cuda_graphs=False).compile_model_aot(model, (torch.randn(2, 3),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert served.infer(torch.ones(2, 3)).path == "eager"
    assert served.infer(torch.ones(2, 3)).path == "compiled"


def test_compiled_code_that_differs_from_eager_is_not_used_and_graphs_go_on_without(model, eager, fake_compiler):
    fake_compiler.make = lambda model: lambda x: model(x) + 1
    served = compiler().compile_model_aot(model, (torch.randn(2, 3),))
    x = torch.randn(2, 3)
    result = served.infer(x)
    assert path_of(result) == ("graph", "")
    assert torch.equal(result.output, eager(model, x))
    found = served.statistics()
    assert found.compiled_sizes == ()
    assert [note.partition(": output differs")[0] for note in found.notes] == [
        "compiled code not used: batch 2",
        "compiled code not used: batch 4",
    ]


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (CudagraphError("no C++ compiler\n  to fix: one"), "not compiled: no C++ compiler; to fix: one"),
        (CompileTimeout("stopped after 1.0 s"), "not compiled: stopped after 1.0 s"),
        (PermissionError("read-only"), "not compiled: PermissionError: read-only"),
    ],
)
def test_a_failed_compile_leaves_graphs_of_the_model_itself(model, eager, fake_compiler, error, note):
    fake_compiler.error = error
    served = compiler(compile_timeout_s=7).compile_model_aot(model, (torch.randn(2, 3),))
    x = torch.randn(2, 3)
    assert torch.equal(served(x), eager(model, x))
    assert served.infer(x).path == "graph"
    assert served.statistics().notes == (note,)
    assert fake_compiler.limits_s == [7]


def test_an_already_compiled_model_is_served_from_graphs_if_they_hold(model, eager):
    model._compiled_call_impl = model._call_impl
    served = compiler().compile_model_aot(model, (torch.randn(2, 3),))
    assert served.statistics().notes[0].startswith("not compiled: the model is already compiled")
    assert torch.equal(served(torch.ones(2, 3)), eager(model, torch.ones(2, 3)))


def test_compiled_code_that_raises_serves_no_more_calls_where_the_model_does_not_raise(model, eager, fake_compiler):
    def make(model):
        def call(x):
            if float(x[0, 0]) == 7:
                raise RuntimeError("only compiled code raises")
            return model(x)

        return call

    fake_compiler.make = make
    served = compiler(enable_cuda_graphs=False).compile_model_aot(model, (torch.randn(2, 3),))
    x = torch.full((2, 3), 7.0)
    result = served.infer(x)
    assert path_of(result) == ("eager", "graphs are switched off")
    assert torch.equal(result.output, eager(model, x))
    assert served.infer(torch.ones(2, 3)).path == "eager"
    assert served.statistics().notes == (
        "compiled code not used: it raised where the model does not: RuntimeError: only compiled code raises",
    )


class Picky(nn.Module):
    def forward(self, x):
        if x.shape[-1] != 3:
            raise LookupError("three columns")
        return x + 1


@pytest.mark.parametrize("graphs", [True, False])
def test_an_error_of_the_model_passes_through_unchanged(graphs, fake_compiler):
    served = compiler(enable_cuda_graphs=graphs).compile_model_aot(Picky(), (torch.ones(2, 3),))
    calls = []
    served.original.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(LookupError, match="three columns") as caught:
        served(torch.ones(2, 4))
    assert len(calls) == 1
    assert caught.value.__cause__ is None is caught.value.__context__
    assert served.statistics().calls == 0
    assert served(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_an_error_of_the_model_on_its_example_passes_through_and_nothing_is_kept():
    made = compiler()
    with pytest.raises(LookupError, match="three columns"):
        made.compile_model_aot(Picky(), (torch.ones(2, 4),), {}, "none")
    assert made.statistics().models == ()


def test_an_error_of_the_optimised_path_is_answered_by_the_model(model, eager, monkeypatch):
    served = compiler().compile_model_aot(model, (torch.randn(2, 3),), {}, "none")

    def broken(self, *args, **kwargs):
        raise RuntimeError("a replay failed")

    monkeypatch.setattr("pytest_cudagraph.serving.graph_runner.GraphRunner.__call__", broken)
    x = torch.randn(2, 3)
    result = served.infer(x)
    assert path_of(result) == ("eager", "the optimised path raised")
    assert torch.equal(result.output, eager(model, x))
    assert served.statistics().notes == ("not served: RuntimeError: a replay failed",)


@pytest.mark.parametrize(
    ("example", "options", "note"),
    [
        ((3,), {}, "not captured: example inputs without a batch dimension run as they are, at one batch size"),
        ((torch.ones(2, 3, device="meta"),), {}, "not captured: there is no device 'meta'"),
        ((torch.ones(()),), {}, "not captured: args[0] has no dimensions, so it has no batch dimension 0"),
    ],
    ids=["no tensor", "device", "no rows"],
)
def test_inputs_that_no_graph_takes_leave_the_model_itself(example, options, note):
    served = compiler(**options).compile_model_aot(lambda x: x, example, {}, "none")
    assert path_of(served.infer(torch.ones(2))) == ("eager", "the graphs could not be made")
    (found,) = served.statistics().notes
    assert found.startswith(note)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_missing_gpu_leaves_the_model_itself(model, eager):
    served = compiler(device="cuda").compile_model_aot(model, (torch.ones(2, 3),), {}, "none")
    assert torch.equal(served(torch.ones(2, 3)), eager(model, torch.ones(2, 3)))
    assert served.statistics().notes[0].startswith("not captured: the device cuda was requested")
    assert served.statistics().device == ""

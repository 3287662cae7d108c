"""What is left in a model after a compile, and what happens when its weights change later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import InputError, create_integrated_compiler


def served_model(model, mode="default", **options):
    made = create_integrated_compiler(batch_sizes=(2,), **options)
    return made.compile_model_aot(model, (torch.linspace(-1, 1, 6).view(2, 3),), {"model_name": "tiny"}, mode)


class Drawing(nn.Module):
    """Counts in a buffer and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + torch.rand_like(x) + self.calls


def test_compiling_leaves_state_and_random_generators_as_they_were(fake_compiler):
    model, before = Drawing().eval(), torch.get_rng_state()
    served = served_model(model)
    assert served.statistics().paths == {}
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_written_in_place_are_seen_by_a_graph(model, eager):
    served, x = served_model(model, "none"), torch.randn(2, 3)
    with torch.no_grad():
        model[0].weight.mul_(2)
    result = served.infer(x)
    assert result.path == "graph"
    assert torch.equal(result.output, eager(model, x))


@pytest.mark.parametrize("mode", ["none", "default", "aot"])
def test_replaced_weights_are_captured_anew_without_the_old_compiled_code(model, eager, fake_compiler, mode):
    served, x = served_model(model, mode), torch.randn(2, 3)
    model[0].weight = nn.Parameter(torch.randn(5, 3))
    result = served.infer(x)
    assert result.path == "graph"
    assert torch.equal(result.output, eager(model, x))
    dropped = [note for note in served.statistics().notes if note.startswith("compiled code dropped")]
    assert len(dropped) == len(fake_compiler.made) == (mode != "none")
    for compiled in fake_compiler.made:
        with pytest.raises(InputError, match="closed"):
            compiled.call_for(2)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "compiled"])
def test_code_that_has_copied_the_weights_is_dropped_when_they_are_written(model, eager, fake_compiler, graphs):
    def make(model):
        weight, bias = model[0].weight.clone(), model[0].bias.clone()
        return lambda x: model[2](torch.relu(x @ weight.T + bias))

    fake_compiler.make = make
    served, x = served_model(model, "aot", enable_cuda_graphs=graphs), torch.randn(2, 3)
    assert served.infer(x).path == ("graph" if graphs else "compiled")
    assert served.statistics().compiled_sizes == (2,)
    with torch.no_grad():
        model[0].weight.mul_(2)
    result = served.infer(x)
    assert result.path == ("graph" if graphs else "eager")
    torch.testing.assert_close(result.output, eager(model, x))
    assert served.statistics().compiled_sizes == ()
    assert served.statistics().notes == (
        "compiled code dropped: the model has changed; its calls and graphs use eager code now; "
        "to compile it again: call compile_model_aot with the same arguments",
    )


def test_a_changed_model_is_compiled_again_when_asked_and_old_handles_profit(model, eager, fake_compiler):
    made, x = create_integrated_compiler(batch_sizes=(2,), enable_cuda_graphs=False), torch.randn(2, 3)
    first = made.compile_model_aot(model, (x,))
    model.train()
    assert first.infer(x).path == "eager"
    assert len(fake_compiler.modes) == 1
    made.compile_model_aot(model, (x,))
    assert len(fake_compiler.modes) == 2
    assert first.infer(x).path == "compiled"
    made.compile_model_aot(model, (x,))
    assert len(fake_compiler.modes) == 2


@pytest.mark.slow
def test_inductor_code_inside_graphs(eager):
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    served, x = served_model(model, "reduce-overhead"), torch.randn(2, 3)
    result = served.infer(x)
    assert result.path == "graph"
    torch.testing.assert_close(result.output, eager(model, x))
    assert served.statistics().compiled_sizes == (2,)
    assert served.statistics().notes == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(served(x), eager(model, x))


def test_an_ahead_of_time_package_is_found_again_and_dropped_when_weights_are_written(
    eager, tmp_path, packaged_as_exported
):
    model, x = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)).eval(), torch.randn(2, 3)
    for _ in range(2):
        served = served_model(model, "aot", cache_dir=tmp_path)
        result = served.infer(x)
        assert (result.path, served.statistics().compiled_sizes) == ("graph", (2,)), served.statistics().notes
        torch.testing.assert_close(result.output, eager(model, x))
        assert len(packaged_as_exported) == 1
    with torch.no_grad():
        model[0].weight.mul_(2)
    result = served.infer(x)
    assert (result.path, served.statistics().compiled_sizes) == ("graph", ())
    torch.testing.assert_close(result.output, eager(model, x))

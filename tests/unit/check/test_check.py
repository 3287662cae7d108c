"""What the check accepts, what it catches, and in which words."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from tests.unit.check.fakes import (
    AddsNoise,
    AnswersCapture,
    AnswersPrevious,
    DoesNothing,
    FakeBackend,
    FakeGraph,
    NeverLaunches,
    Trembling,
    check_graphs,
    check_one,
)
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.values import Agreement, Disagreement


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 4).eval()


def double(x):
    """A model whose numbers are the same on every machine."""
    return x * 2


def text_of(found):
    """All parts of a disagreement."""
    assert isinstance(found, Disagreement)
    hazard = f"hazard: {found.finding_id}\n" if found.finding_id else ""
    evidence = "".join(f"  {line}\n" for line in found.evidence)
    return f"batch {found.batch_size}, {found.where}: {found.message}\n{evidence}{hazard}"


# --- what it accepts ---


def test_a_graph_that_computes_what_eager_computes_agrees():
    model = linear()
    assert check_one(model, FakeGraph(model)) == Agreement(
        batch_size=2,
        replays=8,
        leaves=1,
        state_tensors=2,
        bit_exact=True,
        eager_repeatable=True,
        adversaries=("zeros", "large values", "rows in another order", "a row of NaN"),
    )


def test_every_graph_replays_twice_with_its_siblings_in_between():
    model, log = linear(), []

    class Logs(FakeGraph):
        def answer(self, x):
            log.append(x)
            return self.model(x)

    sizes = (1, 2, 4, 8)
    graphs = {size: Logs(model, batch_size=size) for size in sizes}
    found = check_graphs(model, graphs, {size: (torch.randn(size, 3),) for size in sizes})
    order = [x.shape[0] for x in log]
    assert list(found) == list(sizes)
    assert sorted(order[:4]) == sorted(order[4:8]) == list(sizes)
    assert order[:4] != order[4:8]
    rounds = log[:8]
    assert not any(torch.equal(a, b) for i, a in enumerate(rounds) for b in rounds[i + 1 :] if a.shape == b.shape)


def test_the_same_seed_checks_with_the_same_inputs():
    model, log = linear(), []

    class Logs(FakeGraph):
        def answer(self, x):
            log.append(x.clone())
            return self.model(x)

    x = torch.randn(2, 3)
    check_one(model, Logs(model), x)
    first, log = log, []
    check_one(model, Logs(model), x)
    assert len(first) == len(log) == 8
    assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(first, log, strict=True))


def test_batch_norm_in_training_agrees_and_its_statistics_are_restored():
    model = nn.BatchNorm1d(3).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = check_one(model, FakeGraph(model))
    assert isinstance(found, Agreement)
    assert found.state_tensors == 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_dropout_in_training_agrees_because_both_sides_have_one_seed():
    model = nn.Dropout(0.5).train()
    assert check_one(model, FakeGraph(model), torch.randn(2, 64)).bit_exact


def test_the_generators_are_afterwards_where_they_were():
    model, x = nn.Dropout(0.5).train(), torch.randn(2, 3)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    check_one(model, FakeGraph(model), x)
    assert torch.equal(torch.rand(3), expected)


def test_a_generator_of_the_models_own_is_afterwards_where_it_was():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            return x + torch.rand(x.shape, generator=self.generator)

    model = Draws()
    state = model.generator.get_state()
    check_one(model, FakeGraph(model), backend=open_backend("cpu"))
    assert torch.equal(model.generator.get_state(), state)


class Cache(nn.Module):
    """Writes its input into the next place of a fixed buffer, as a static key-value cache does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 5, 3))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.keys.index_copy_(1, self.position, x.unsqueeze(1))
        self.position.add_(1)
        return self.keys.sum(1)


def test_a_cache_written_in_place_agrees():
    model = Cache()
    found = check_one(model, FakeGraph(model))
    assert isinstance(found, Agreement)
    assert model.position.item() == 0


def test_noise_of_eager_itself_is_tolerated():
    model = Trembling(3e-5)
    found = check_one(model, FakeGraph(model))
    assert isinstance(found, Agreement)
    assert not found.eager_repeatable
    assert not found.bit_exact
    assert found.notes == (
        "eager is not repeatable: two runs from the same state, inputs and seed differ, most in output "
        "(twice this difference was allowed)",
    )


def test_nan_equals_nan_and_is_noted():
    model = torch.log

    found = check_one(model, FakeGraph(model))
    assert isinstance(found, Agreement)
    assert found.notes == ("eager itself gives NaN in output (NaN counts as equal to NaN)",)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None
    count: int


class ModelOutput(OrderedDict):
    """Items that are attributes too, as in transformers."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


@pytest.mark.parametrize(
    ("make", "leaves"),
    [
        (lambda x: {"logits": x * 2, "aux": (x + 1, None)}, 2),
        (lambda x: Output(logits=x * 2, hidden=None, count=3), 1),
        (lambda x: ModelOutput(logits=x * 2), 1),
        (lambda x: [x * 2, x > 0, x.long()], 3),
    ],
    ids=["dict", "dataclass", "model output", "list"],
)
def test_nested_outputs_are_compared_leaf_by_leaf(make, leaves):
    found = check_one(make, FakeGraph(make))
    assert isinstance(found, Agreement)
    assert found.leaves == leaves


def test_outputs_that_are_objects_are_named_as_not_compared():
    class Statistics:
        pass

    def model(x):
        return x + 1, Statistics()

    found = check_one(model, FakeGraph(model))
    assert found.not_compared == ("output[1] (Statistics)",)


def test_state_that_cannot_be_saved_is_named_as_not_compared():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = torch.eye(3).to_sparse()

        def forward(self, x):
            return x * 2

    model = Sparse()
    assert check_one(model, FakeGraph(model)).not_compared == ("state 'graph'",)


def test_a_call_without_outputs_is_judged_by_the_state():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(x.sum(0))

    model = Writes()
    assert check_one(model, FakeGraph(model)).leaves == 0
    assert text_of(check_one(model, DoesNothing(model, None))).startswith("batch 2, buffer 'total': ")


def test_outputs_that_do_not_depend_on_the_inputs_are_a_warning():
    def model(x):
        return torch.zeros_like(x)

    (warning,) = check_one(model, FakeGraph(model)).warnings
    assert warning.startswith("outputs do not depend on the inputs, so the check proves almost nothing. ")


def test_inputs_that_cannot_be_drawn_anew_weaken_the_proof():
    def model(x):
        return x + 1

    found = check_one(model, FakeGraph(model), torch.ones(2, dtype=torch.bool))
    assert [note.partition(":")[0] for note in found.notes] == ["the inputs hold nothing that can be drawn again"]


def test_an_argument_changed_in_place_is_noted():
    def model(x, *, mask):
        return x.add_(1) * mask

    x = torch.randn(2, 3)
    before = x.clone()
    assert check_one(model, FakeGraph(model), x, kwargs={"mask": torch.ones(2, 3)}).notes == (
        "eager changes its argument args[0] in place, replay changes the graph's copy of it",
    )
    assert torch.equal(x, before)


def test_the_users_tolerances_replace_those_of_the_dtype():
    model = linear()
    graph = AddsNoise(model, 1e-3)
    assert isinstance(check_one(model, graph), Disagreement)
    assert isinstance(check_one(model, graph, rtol=0.0, atol=1e-2), Agreement)
    assert isinstance(check_one(model, graph, atol=1e-2), Agreement)
    assert isinstance(check_one(model, graph, rtol=1e-8), Disagreement)


def test_whole_numbers_are_exact_whatever_the_tolerance():
    def model(x):
        return (x * 100).long()

    assert isinstance(check_one(model, AddsNoise(model, 1), rtol=1.0, atol=10.0), Disagreement)


def test_progress_names_each_trial():
    model, lines = linear(), []
    check_one(model, FakeGraph(model), progress=lines.append)
    assert lines == [
        "check batch 2",
        "check batch 2",
        "check batch 2: adversarial inputs, changed parameters",
        "check batch 2: earlier calls",
        "check batch 2: later calls",
    ]


# --- what it catches ---


def test_a_difference_is_reported_with_place_and_numbers(golden):
    def in_dict(x):
        return {"logits": x * 2}

    golden("check-difference.txt", text_of(check_one(in_dict, AddsNoise(in_dict, 1e-3))))


def test_a_replay_that_does_nothing_still_holds_the_poison(golden):
    x = torch.randn(2, 3)
    golden("check-poison.txt", text_of(check_one(double, DoesNothing(double, x), x)))


def test_a_replay_that_does_nothing_is_caught_in_whole_numbers_too():
    def model(x):
        return (x * 100).long()

    x = torch.randn(2, 3)
    found = check_one(model, DoesNothing(model, model(x)), x)
    assert found.message == "replay did not write this output: it still holds what it was poisoned with"


def test_a_constant_result_is_not_taken_for_the_poison():
    def model(x):
        return (x * 100).long()

    found = check_one(model, FakeGraph(lambda x: torch.zeros(2, 3, dtype=torch.int64)))
    assert found.message.startswith("off by")


def test_a_small_error_in_a_result_that_hardly_varies_is_not_taken_for_a_stale_input():
    def model(x):
        return 1 + x * 1e-12

    found = check_one(model, AddsNoise(model, 1e-6), rtol=0.0, atol=0.0)
    assert found.message.startswith("off by")


def test_an_output_that_is_state_is_compared_as_it_was_returned():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 3))

        def forward(self, x):
            return self.last.copy_(x)

    model = Last()
    assert isinstance(check_one(model, FakeGraph(model)), Agreement)
    assert check_one(model, FakeGraph(lambda x: model.last)).where == "output"


def test_a_replay_on_the_inputs_of_capture_is_a_stale_input(golden):
    x = torch.randn(2, 3)
    golden("check-stale-capture.txt", text_of(check_one(double, AnswersCapture(double, (x,)), x)))


def test_a_replay_that_lags_one_call_behind_is_a_stale_input():
    x = torch.randn(2, 3)
    found = check_one(double, AnswersPrevious(double, (x,)), x)
    assert found.message == "stale input: replay returns eager's result for the inputs of capture"


def test_a_replay_on_the_previous_inputs_is_distinguished_from_one_on_those_of_capture():
    x = torch.randn(2, 3)

    class LateStale(AnswersPrevious):
        def answer(self, x):
            previous, self.previous = self.previous, (x.clone(),)
            return double(x if self.replays == 1 else previous[0])

    found = check_one(double, LateStale(double, (x,)), x)
    assert found.message == "stale input: replay returns eager's result for the previous inputs"


class Scaled(nn.Module):
    """A Python number that the caller changes."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale


def test_a_baked_scalar_is_caught():
    model = Scaled()

    def baked(x, scale=model.scale):
        return x * scale

    graph = FakeGraph(baked)
    model.scale = 2.0
    assert isinstance(check_one(model, graph), Disagreement)


class Counts(nn.Module):
    """A Python number that the model itself changes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_a_baked_counter_is_caught_with_its_hazard(golden):
    golden("check-counter.txt", text_of(check_one(Counts(), FakeGraph(lambda x: x * 4))))


def test_python_values_that_no_output_shows_are_noted():
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 2

    model = Logs()
    found = check_one(model, FakeGraph(double))
    assert found.notes == ("eager changes Python values of the model, replay does not",)
    assert model.calls == 0


def test_a_source_that_cannot_be_restored_makes_two_eager_runs_differ(golden):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = iter(range(1, 100))

        def forward(self, x):
            return x * next(self.calls)

    model = Counts()
    golden("check-two-answers.txt", text_of(check_one(model, FakeGraph(lambda x: x))))


def test_a_forgotten_buffer_is_named(golden):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x):
            self.steps.add_(1)
            return x + 1

    model = Steps()
    golden("check-state.txt", text_of(check_one(model, FakeGraph(lambda x: x + 1))))


def test_eager_that_returns_two_structures_is_reported():
    answers = iter([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    found = check_one(lambda x: next(answers), FakeGraph(double))
    assert found.message.startswith("two eager runs ")
    assert found.evidence[0] == "eager gives output['a'], then output['b']"


def test_eager_that_returns_two_plain_values_is_reported():
    answers = iter(range(100))
    found = check_one(lambda x: next(answers), FakeGraph(double))
    assert found.evidence[0] == "eager gives 0, then 1"


def test_noise_of_more_than_half_the_digits_is_no_rounding():
    model = Trembling(1e-2)
    assert check_one(model, FakeGraph(model)).message.startswith("two eager runs ")


def test_an_overwritten_parameter_is_named(golden):
    model = linear()
    model.bias.data.copy_(torch.arange(4.0) / 4)

    def overwrites(x):
        answer = model(x)
        model.bias.data.zero_()
        return answer

    bias = model.bias.detach().clone()
    golden("check-overwritten.txt", text_of(check_one(model, FakeGraph(overwrites))))
    assert torch.equal(model.bias, bias)


def test_rebound_state_is_named_with_its_hazard(golden):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x + 1

    model = Grows()
    golden("check-rebound.txt", text_of(check_one(model, FakeGraph(lambda x: x + 1))))


def test_an_output_that_differs_beside_rebound_state_names_it():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(3)

        def forward(self, x):
            self.total = self.total + x.sum(0)
            return x + self.total

    found = check_one(Grows(), FakeGraph(double))
    assert found.where == "output"
    assert found.evidence[-1] == "eager puts a new tensor there, replay keeps the old one: state 'total'"
    assert found.finding_id == "rebinds-state"


def test_weights_that_moved_since_capture_are_named():
    model = linear()
    captured_at = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    old = model.weight.detach(), model.bias.detach()
    graph = FakeGraph(lambda x: nn.functional.linear(x, *old))
    model.weight.data = model.weight.data * 2
    found = check_one(model, graph, captured_at=captured_at)
    assert found.evidence[-1] == "moved since capture, replay still reads the old address: parameter 'weight'"
    assert found.finding_id == "rebinds-state"


def test_a_cache_among_the_arguments_is_compared_and_restored():
    class Cache:
        def __init__(self):
            self.keys = torch.zeros(2, 3)

    def model(x, *, cache):
        cache.keys.add_(x)
        return cache.keys * 1

    cache = Cache()
    assert check_one(model, FakeGraph(model), kwargs={"cache": cache}).state_tensors == 1
    assert not cache.keys.any()
    forgets = FakeGraph(lambda x, *, cache: x * 1)
    assert check_one(model, forgets, kwargs={"cache": cache}).where == "state \"kwargs['cache'].keys\""


def test_a_plain_value_that_differs_is_baked(golden):
    def model(x):
        return x + 1, x.shape[0]

    golden("check-plain-value.txt", text_of(check_one(model, FakeGraph(lambda x: (x + 1, 1)))))


def test_another_structure_is_reported(golden):
    def model(x):
        return {"logits": x, "aux": x + 1}

    golden("check-structure.txt", text_of(check_one(model, FakeGraph(lambda x: {"logits": x}))))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x.double(), "replay gives dtype float64 where eager gives dtype float32"),
        (lambda x: x[:1], "replay gives shape (1, 3) where eager gives shape (2, 3)"),
        (lambda x: torch.cat([x[:1], x[1:] / 0]), "eager "),
        (lambda x: None, "replay returns None, eager a tensor of shape (2, 3)"),
    ],
    ids=["dtype", "shape", "infinity", "none"],
)
def test_results_of_another_kind_are_reported(wrong, message):
    def model(x):
        return x + 0

    found = check_one(model, FakeGraph(wrong), torch.zeros(2, 3))
    assert isinstance(found, Disagreement)
    assert found.message.startswith(message)
    assert found.finding_id is None


def test_a_call_that_launches_nothing_is_caught_although_its_result_is_right():
    model = linear()
    assert text_of(check_one(model, NeverLaunches(model))) == (
        "batch 2, graph: the call returned without launching the graph\n"
    )


def test_random_numbers_of_compiled_code_are_distinguished_from_a_wrong_result():
    model = nn.Dropout(0.5).train()
    found = check_one(model, FakeGraph(lambda x: x * 2, opaque_regions=1), torch.randn(2, 64))
    assert found.evidence[-1] == (
        "eager draws random numbers here, and compiled code draws others from the same seed "
        "(torch._inductor.config.fallback_random makes them equal)"
    )


def test_one_wrong_graph_leaves_its_siblings_their_verdict():
    model = linear()
    graphs = {2: FakeGraph(model), 4: AddsNoise(model, 1.0, batch_size=4)}
    found = check_graphs(model, graphs, {size: (torch.randn(size, 3),) for size in graphs})
    assert isinstance(found[2], Agreement)
    assert found[4].batch_size == 4
    assert graphs[4].replays == 1


# --- what it refuses to judge ---


def test_a_replay_that_raises_is_an_error_of_its_own():
    class Raises(FakeGraph):
        def answer(self, x):
            raise RuntimeError("CUDA error: an illegal memory access\nmore")

    model = linear()
    with pytest.raises(CudagraphError) as caught:
        check_one(model, Raises(model))
    assert str(caught.value) == "batch 2: replay raised RuntimeError: CUDA error: an illegal memory access"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_eager_that_cannot_take_fresh_inputs_is_an_error_of_the_inputs(golden):
    def model(x):
        raise ValueError("x must hold the numbers of the example")

    with pytest.raises(InputError) as caught:
        check_one(model, FakeGraph(model))
    golden("check-fresh-inputs.txt", str(caught.value))


def test_the_state_is_restored_after_an_error_and_after_ctrl_c():
    class Stops(FakeGraph):
        def answer(self, x):
            self.model(x)
            raise KeyboardInterrupt

    model = nn.BatchNorm1d(3).train()
    with pytest.raises(KeyboardInterrupt):
        check_one(model, Stops(model))
    assert model.num_batches_tracked.item() == 0
    assert not model.running_mean.any()


def test_state_that_cannot_be_restored_is_named():
    class Forgetful(FakeBackend):
        def set_rng_state(self, state):
            pass

    model = linear()
    with pytest.raises(CudagraphError, match=r"could not restore the state of the model: the random generators"):
        check_one(model, FakeGraph(model), backend=Forgetful())

"""What must hold beyond one replay: earlier results, changed parameters, generators, rows beside other rows."""

from __future__ import annotations

import pytest
import torch
from tests.unit.check.fakes import AnswersCapture, FakeGraph, check_graphs, check_one
from torch import nn

from pytest_cudagraph.values import Agreement, Disagreement

FOLLOWS_NOT = "eager follows an in-place change of the model's state, replay does not"

OWN_WEIGHTS = (
    "the compiled code holds weights of its own (a package, or frozen weights): it does not see an in-place change of "
    "the eager model's parameters"
)


def linear():
    return nn.Linear(3, 4).eval()


# --- earlier results ---


class Drifts(FakeGraph):
    """Answers otherwise once a sibling has replayed often enough: memory of its own that the sibling writes to."""

    def __init__(self, model, sibling, after, **options):
        super().__init__(model, **options)
        self.sibling, self.after = sibling, after

    def answer(self, x):
        return self.model(x) + (1 if self.sibling.replays > self.after else 0)


def test_an_answer_that_changes_after_a_siblings_replays_is_caught(golden):
    def double(x):
        return x * 2

    sibling = FakeGraph(double, batch_size=4)
    # Two rounds, four adversarial inputs and the rows of the smaller batch: seven replays before the last.
    graphs = {2: Drifts(double, sibling, after=6), 4: sibling}
    found = check_graphs(double, graphs, {2: (torch.ones(2, 3),), 4: (torch.ones(4, 3),)})
    assert isinstance(found[4], Agreement)
    golden(
        "check-later.txt",
        "\n".join([f"batch 2, {found[2].where}: {found[2].message}", *(f"  {line}" for line in found[2].evidence)]),
    )


class NoCopy(torch.Tensor):
    """Its clone is the tensor itself, as if a later replay wrote to the memory of the copy."""

    def detach(self):
        return self

    def clone(self):
        return self


def test_a_copy_that_a_later_replay_writes_to_is_caught():
    class Overwrites(FakeGraph):
        def written(self, output):
            return super().written(output).as_subclass(NoCopy)

    model = linear()
    found = check_one(model, Overwrites(model))
    assert found.message == (
        "a copy of an earlier result has changed: a later replay wrote to memory outside its graph"
    )


def test_the_same_question_is_asked_again_at_the_end():
    asked = []

    class Logs(FakeGraph):
        def answer(self, x):
            asked.append(x.clone())
            return self.model(x)

    model = linear()
    check_one(model, Logs(model))
    assert torch.equal(asked[-1], asked[1])


# --- parameters changed in place ---


def test_a_copy_of_a_parameter_is_caught_and_named():
    model = linear()
    weight = model.weight.detach().clone()
    found = check_one(model, FakeGraph(lambda x: nn.functional.linear(x, weight, model.bias)))
    assert isinstance(found, Disagreement)
    assert found.message == FOLLOWS_NOT
    assert found.evidence[0] == "changed: parameter 'weight'"
    assert found.finding_id == "foreign-tensor"


def test_a_copy_that_a_norm_hides_is_caught():
    """Scaled by one factor a weight before a norm changes nothing: each element is changed by another."""
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.LayerNorm(8)).eval()
    weight = model[0].weight.detach().clone()
    found = check_one(model, FakeGraph(lambda x: model[1](x @ weight.T)), rtol=1e-4, atol=1e-4)
    assert found.evidence[0] == "changed: parameter '0.weight'"


def test_a_bias_of_zeros_is_changed_too():
    model = linear()
    nn.init.zeros_(model.bias)
    found = check_one(model, FakeGraph(lambda x: nn.functional.linear(x, model.weight)))
    assert found.evidence[0] == "changed: parameter 'bias'"


def test_a_buffer_is_changed_where_there_is_no_parameter():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x):
            return x * self.scale

    model, scale = Scales(), torch.tensor([1.0, 2.0, 3.0])
    assert check_one(model, FakeGraph(lambda x: x * scale)).evidence[0] == "changed: buffer 'scale'"


def test_parameters_are_afterwards_as_they_were():
    model = nn.LSTM(3, 4).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert isinstance(check_one(model, FakeGraph(model)), Agreement)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(tensor.requires_grad for tensor in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_parameters_of_any_dtype_are_changed(dtype):
    model = nn.Linear(3, 4, dtype=dtype).eval()
    old = [tensor.detach().clone() for tensor in model.parameters()]
    example = torch.randn(2, 3, dtype=dtype)
    found = check_one(model, FakeGraph(lambda x: nn.functional.linear(x, *old)), example)
    assert found.message == FOLLOWS_NOT


def test_a_model_that_takes_no_other_parameters_is_left_in_peace():
    class Checks(nn.Linear):
        def forward(self, x):
            assert self.weight.sum() == self.total, "somebody changed the weights"
            return super().forward(x)

    model = Checks(3, 4)
    model.total = model.weight.sum()
    assert isinstance(check_one(model, FakeGraph(model)), Agreement)


def test_parameters_that_no_output_depends_on_say_nothing():
    class Ignores(nn.Linear):
        def forward(self, x):
            return x * 2

    model = Ignores(3, 4)
    assert check_one(model, FakeGraph(lambda x: x * 2)).notes == ()


def test_compiled_code_with_weights_of_its_own_is_noted_and_no_fault():
    model = linear()
    own = [tensor.detach().clone() for tensor in model.parameters()]

    def package(x):
        return nn.functional.linear(x, *own)

    found = check_one(model, FakeGraph(package, opaque_regions=1), captured=package)
    assert isinstance(found, Agreement)
    assert found.notes == (OWN_WEIGHTS,)


def test_compiled_code_with_one_folded_weight_is_noted():
    model = linear()
    folded = model.bias.detach().clone() + 0.5

    def frozen(x):
        return nn.functional.linear(x, model.weight, folded - 0.5)

    found = check_one(model, FakeGraph(frozen, opaque_regions=1), captured=frozen)
    assert isinstance(found, Agreement)
    assert found.notes == (OWN_WEIGHTS,)


def test_compiled_code_that_follows_while_its_graph_does_not_is_a_fault():
    model = linear()
    old = [tensor.detach().clone() for tensor in model.parameters()]

    def compiled(x):
        return model(x)

    graph = FakeGraph(lambda x: nn.functional.linear(x, *old), opaque_regions=1)
    assert check_one(model, graph, captured=compiled).message == FOLLOWS_NOT


# --- random generators ---


def test_a_replay_that_leaves_the_generators_elsewhere_is_caught():
    def draws_more(x):
        torch.rand(1)
        return x * 2

    def model(x):
        return x * 2

    found = check_one(model, FakeGraph(draws_more))
    assert found == Disagreement(
        batch_size=2,
        where="the random generators",
        message="their state after a replay differs from their state after eager",
        evidence=("eager draws none, replay draws random numbers",),
        finding_id="rng",
    )


def test_compiled_code_that_draws_in_its_own_way_is_noted():
    def model(x):
        torch.rand(4)
        return x * 2

    found = check_one(model, FakeGraph(lambda x: x * 2, opaque_regions=1))
    assert found.notes == (
        "compiled code leaves the random generators in another state than eager: later numbers differ",
    )


# --- rows beside other rows ---


def rows_note(where, found):
    (note,) = found.notes
    return note.startswith(f"rows are not independent: {where} differs by ") and note.endswith(
        " in a graph of batch 4, beside other rows. "
        "Padding would change results (GraphRunner runs such batches eagerly)"
    )


def check_sizes(model):
    graphs = {size: FakeGraph(model, batch_size=size) for size in (2, 4)}
    return check_graphs(model, graphs, {size: (torch.randn(size, 3),) for size in (2, 4)})


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (nn.Softmax(0), "output"),
        (lambda x: {"out": x * 2, "mean": x.mean(0)}, "output['mean']"),
        (lambda x: x / x.shape[0], "output"),
    ],
    ids=["softmax", "mean", "count"],
)
def test_rows_that_depend_on_each_other_are_noted_at_the_size_that_would_be_padded(model, where):
    found = check_sizes(model)
    assert rows_note(where, found[2])
    assert found[4].notes == ()


def noisy(x):
    return x + torch.rand(3, len(x)).T  # each row draws other numbers when there are more rows


@pytest.mark.parametrize("model", [nn.Linear(3, 4), noisy], ids=["independent", "random"])
def test_independent_rows_and_random_ones_are_not_noted(model):
    assert all(each.notes == () for each in check_sizes(model).values())


# --- a single whole number ---


def test_a_stale_token_is_caught_although_no_range_is_known_of_it():
    table, token = nn.Embedding(10, 4), torch.tensor([[5], [5]])
    found = check_one(table, AnswersCapture(table, (token,)), token)
    assert found.message == "stale input: replay returns eager's result for the previous inputs"


def test_a_number_that_eager_does_not_take_is_not_tried():
    def model(token):
        assert int(token.max()) == 5, "five only"
        return token * 2

    found = check_one(model, FakeGraph(model), torch.tensor([[5], [5]]))
    assert [note.partition(":")[0] for note in found.notes] == ["the inputs hold nothing that can be drawn again"]

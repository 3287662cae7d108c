"""A graph of the CPU twin behaves as a CUDA graph does: addresses, state, random numbers, buffers."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.cpu import CpuBackend
from pytest_cudagraph.errors import CudagraphError, InputError


def capture(twin, model, *args, **kwargs):
    return twin.capture(model, args, kwargs, batch_size=2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        return x + self.steps


def test_a_capture_executes_nothing(twin):
    model = Counting()
    graph = capture(twin, model, torch.zeros(2))
    assert model.steps.item() == 3  # the warm-ups; undoing those is not the pool's work
    assert graph.replay().tolist() == [4, 4]


def test_outputs_are_poisoned_until_the_first_replay(twin):
    outputs = {}

    def model(x):
        outputs["all"] = (x * 2, x.int(), x > 0)
        return outputs["all"]

    capture(twin, model, torch.ones(2))
    floats, integers, booleans = outputs["all"]
    assert floats.isnan().all()
    assert (integers == torch.iinfo(torch.int32).max).all()
    assert booleans.all()


def test_a_capture_leaves_parameters_inputs_and_random_numbers(twin):
    weight = nn.Parameter(torch.ones(2))
    example = torch.ones(2)
    states = []

    def model(x):
        states.append(torch.get_rng_state() if len(states) < 3 else None)
        weight.mul_(2)
        x.add_(torch.rand(2, device=x.device))
        return x * weight

    graph = capture(twin, model, example)
    assert weight.tolist() == [8, 8]
    assert example.tolist() == [1, 1]
    # What the three warm-ups drew is gone, what the recording drew is not.
    expected = torch.Generator()
    expected.set_state(states[0])
    for _ in range(3):
        torch.rand(2, generator=expected)
    assert torch.equal(expected.get_state(), torch.get_rng_state())
    assert graph.replay().isfinite().all()


def test_replay_runs_no_python_of_the_model(twin):
    model = Counting()
    graph = capture(twin, model, torch.zeros(2))
    calls = model.calls
    graph(torch.ones(2))
    graph.replay()
    assert model.calls == calls
    assert graph.replays == 2
    assert model.steps.item() == 5


def test_every_replay_returns_the_same_buffers(twin):
    graph = capture(twin, lambda x: x * 2, torch.ones(2))
    first = graph(torch.tensor([1.0, 2.0]))
    second = graph(torch.tensor([3.0, 4.0]))
    assert first is second
    assert first.tolist() == [6, 8]


def test_weights_changed_in_place_are_seen_and_replaced_ones_are_not(twin):
    model = nn.Linear(2, 2, bias=False)
    graph = capture(twin, model, torch.eye(2))
    old = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.mul_(2)
    assert torch.equal(graph.replay(), (2 * old).t())
    kept = model.weight.detach()
    model.weight.data = torch.zeros(2, 2)
    assert torch.equal(graph.replay(), (2 * old).t())
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(graph.replay(), (2 * old).t())
    kept.zero_()
    assert not graph.replay().any()


def test_a_tensor_whose_data_is_replaced_is_read_at_its_old_address(twin):
    offset = torch.ones(2)
    graph = capture(twin, lambda x: torch.atleast_1d(x) - offset.view(2) + torch.lerp(x, offset, 0.5), torch.zeros(2))
    kept = offset.detach()
    offset.data = torch.full((2,), 9.0)
    assert kept.tolist() == [1, 1]
    assert graph(torch.ones(2)).tolist() == [1, 1]


def test_scalars_and_branches_are_baked(twin):
    factor = [1.0]
    graph = capture(twin, lambda x: x * factor[0] if factor[0] < 2 else x, torch.ones(2))
    factor[0] = 5.0
    assert graph(torch.ones(2)).tolist() == [1, 1]


def test_random_numbers_are_drawn_from_the_live_generator(twin):
    graph = capture(twin, lambda x: x + torch.rand(2, device=x.device), torch.zeros(2))
    torch.manual_seed(7)
    first, second = graph.replay().clone(), graph.replay().clone()
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(2))
    assert torch.equal(second, torch.rand(2))


def test_an_output_may_be_a_view_of_the_input(twin):
    graph = capture(twin, lambda x: (x.view(2, 1), x.t()), torch.ones(2))
    graph.poison()
    column, row = graph(torch.tensor([1.0, 2.0]))
    assert column.tolist() == [[1], [2]]
    assert row.tolist() == [1, 2]
    assert graph.replay()[1].tolist() == [1, 2]


def test_an_output_may_be_a_parameter_which_poison_leaves_alone(twin):
    model = nn.Linear(2, 2)
    graph = capture(twin, lambda x: (model.weight, model(x)), torch.ones(2))
    before = model.weight.detach().clone()
    graph.poison()
    assert torch.equal(model.weight, before)
    weight, result = graph.replay()
    assert torch.equal(weight, before)
    assert torch.equal(result, model(torch.ones(2)))


def test_poison_fills_the_outputs_until_the_next_replay(twin):
    graph = capture(twin, lambda x: x * 2, torch.ones(2))
    output = graph.replay()
    graph.poison()
    assert output.isnan().all()
    assert graph.replay().tolist() == [2, 2]


def test_a_tensor_kept_on_the_model_follows_replays(twin):
    class Keeps(nn.Module):
        def forward(self, x):
            self.hidden = x * 2
            return self.hidden + 1

    model = Keeps()
    graph = capture(twin, model, torch.zeros(2))
    graph(torch.tensor([1.0, 2.0]))
    assert model.hidden.tolist() == [2, 4]


def test_an_opaque_output_holds_tensors_that_follow_replays(twin):
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    graph = capture(twin, lambda x: (x + 1, Cache(x * 2)), torch.zeros(2))
    _, cache = graph(torch.tensor([1.0, 2.0]))
    assert cache.keys.tolist() == [2, 4]


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    label: str = "none"


Pair = namedtuple("Pair", "low high")


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: {"a": x + 1, "n": 3}, lambda out: out["a"]),
        (lambda x: [x - 1, None, x + 1], lambda out: out[2]),
        (lambda x: Scores(logits=x + 1, hidden=[x * 2]), lambda out: out.logits),
        (lambda x: Pair(x - 1, x + 1), lambda out: out.high),
    ],
    ids=["dict", "list", "dataclass", "namedtuple"],
)
def test_outputs_keep_their_containers(twin, make, read):
    graph = capture(twin, make, torch.zeros(2))
    out = graph(torch.tensor([1.0, 2.0]))
    assert type(out) is type(make(torch.zeros(2)))
    assert read(out).tolist() == [2, 3]


def test_keyword_arguments_nested_inputs_and_plain_values(twin):
    def model(pair, *, extra, scale):
        return (pair[0] + extra.pop("bias")) * scale

    def given(value):
        return [torch.full((2,), value)], {"extra": {"bias": torch.ones(2)}, "scale": 3}

    args, kwargs = given(0.0)
    graph = twin.capture(model, (args,), kwargs, batch_size=2)
    args, kwargs = given(2.0)
    assert graph(args, **kwargs).tolist() == [9, 9]
    with pytest.raises(InputError, match=r"kwargs\['scale'\]: 3 is baked into the graph; this call gives 4"):
        graph(args, extra=kwargs["extra"], scale=4)


@pytest.mark.parametrize(
    "given",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta"), [1.0, 2.0]],
    ids=["shape", "dtype", "device", "list"],
)
def test_other_inputs_than_captured_are_refused_and_touch_nothing(twin, given):
    graph = capture(twin, lambda x, y: x + y, torch.ones(2), torch.ones(2))
    with pytest.raises(InputError):
        graph(torch.full((2,), 9.0), given)
    assert graph.replay().tolist() == [2, 2]


def test_too_few_and_too_many_arguments_are_refused(twin):
    graph = capture(twin, lambda x: x + 1, torch.ones(2))
    for args in [(), (torch.ones(2), torch.ones(2))]:
        with pytest.raises(InputError, match="this call gives"):
            graph(*args)


IN_PLACE = {
    "add_": lambda x: x.clone().add_(1).mul_(2),
    "view": lambda x: x.clone().view(-1)[:1].add_(5),
    "copy_": lambda x: torch.zeros(2, device=x.device).copy_(x),
    "fill": lambda x: torch.empty(2, device=x.device).fill_(2.0) + x,
    "out": lambda x: torch.add(x, 1, out=torch.empty(2, device=x.device)) * 2,
    "index_put": lambda x: x.clone().index_put_((torch.arange(1, device=x.device),), x[:1] * 9),
    "t_": lambda x: (x.view(1, 2) * 2).t_() + 1,
    "squeeze_": lambda x: (x.view(1, 2) * 2).squeeze_(0) + 1,
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1)[1],
    "slice": lambda x: torch.stack([x, x])[:, 1:].add_(1),
    "setitem": lambda x: _set_first(torch.zeros_like(x), x),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "masked": lambda x: _set_masked(x.clone()),
    "max": lambda x: x.max(dim=0).values + x.max(dim=0).indices,
    "scalar": lambda x: x * torch.tensor(3.0),
    "own constant": lambda x: torch.tensor(3.0).add_(x.sum()),
    "expand": lambda x: x.sum().expand(3) * 1.5,
    "split": lambda x: torch.cat([part * 2 for part in torch.cat([x, x]).split(1)]),
    "einsum": lambda x: torch.einsum("i,j->ij", x, x),
    "empty result": lambda x: x[:0] * 2,
    "complex": lambda x: torch.fft.fft(x).abs(),
}


def _set_first(target, x):
    target[0] = x[1]
    return target


def _set_masked(x):
    x[x > 1] = 7.0
    return x


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_that_write_or_alias_replay_as_eager(twin, name):
    model = IN_PLACE[name]
    graph = capture(twin, model, torch.ones(2))
    for values in ([1.0, 2.0], [-3.0, 0.5], [4.0, 4.0]):
        graph.poison()
        given = torch.tensor(values)
        assert torch.equal(graph(given), model(given.clone()))
    assert torch.equal(graph.replay(), model(given.clone()))


def test_a_custom_operator_that_writes_is_undone_and_replayed(twin):
    with torch.library._scoped_library("twin", "FRAGMENT") as library:
        library.define("advance(Tensor(a!) state) -> ()")
        library.impl("advance", lambda state: state.add_(1) and None, "CPU")
        state = torch.zeros(1)

        def model(x):
            torch.ops.twin.advance(state)
            return x + state

        graph = capture(twin, model, torch.zeros(1))
        assert state.item() == 3
        assert graph.replay().item() == 4
        assert graph.receipt.kernel_names == {"twin.advance": 1, "aten.add": 1}


def test_batch_norm_updates_its_statistics_once_per_replay(twin):
    norm, given = nn.BatchNorm1d(2).train(), torch.randn(4, 2)
    graph = capture(twin, norm, given)
    assert norm.num_batches_tracked.item() == 3
    before = norm.running_mean.clone()
    graph(given)
    assert norm.num_batches_tracked.item() == 4
    torch.testing.assert_close(norm.running_mean, 0.9 * before + 0.1 * given.mean(0))


def test_an_input_written_in_place_is_replayed_on_the_copy(twin):
    graph = capture(twin, lambda x: x.add_(1), torch.zeros(2))
    given = torch.zeros(2)
    assert graph(given).tolist() == [1, 1]
    assert given.tolist() == [0, 0]
    assert graph.replay().tolist() == [2, 2]


def test_a_graph_replays_outside_inference_mode_and_under_a_callers_autocast(twin):
    model = nn.Conv1d(2, 4, 3)
    given = torch.randn(2, 2, 8)
    graph = capture(twin, model, given)
    with torch.inference_mode():
        wanted = model(given)
    assert torch.equal(graph(given.clone().requires_grad_()), wanted)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        graph.poison()
        assert torch.equal(graph(given), wanted)


def test_autocast_inside_the_model_is_recorded(twin):
    linear = nn.Linear(8, 8)

    def model(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x)

    given = torch.randn(2, 8)
    graph = capture(twin, model, given)
    with torch.inference_mode():
        wanted = model(given)
    assert wanted.dtype is torch.bfloat16
    assert torch.equal(graph(given), wanted)


def test_during_a_capture_torch_says_that_a_stream_is_capturing_and_then_no_more(twin, monkeypatch):
    def never():
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", never)
    claimed = []

    def model(x):
        claimed.append(torch.cuda.is_current_stream_capturing())
        return x + 1

    capture(twin, model, torch.ones(2))
    assert claimed == [False, False, False, True]
    assert torch.cuda.is_current_stream_capturing is never


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda x: 3, "the output (int) holds no tensor that a replay could renew; return a tensor, or tensors in "
                      "lists, tuples, dicts or dataclasses"),
        (lambda x: None, "the output (NoneType) holds no tensor that a replay could renew; return a tensor, or "
                         "tensors in lists, tuples, dicts or dataclasses"),
        (lambda x: (part for part in [x]), "output is a generator: it can be read once, while a graph returns the "
                                           "same output at every replay; return a list or a tuple"),
        (lambda x: {"a": x, "b": iter([x])}, "output['b'] is a list_iterator: it can be read once, while a graph "
                                             "returns the same output at every replay; return a list or a tuple"),
    ],
    ids=["number", "none", "generator", "iterator inside"],
)  # fmt: skip
def test_outputs_that_no_replay_can_renew_are_refused(twin, output, text):
    with pytest.raises(InputError) as caught:
        capture(twin, output, torch.ones(2))
    assert str(caught.value) == text


def test_a_closed_graph_says_so(twin):
    graph = capture(twin, lambda x: x + 1, torch.ones(2))
    graph.close()
    graph.close()
    for use in (graph.replay, lambda: graph(torch.ones(2))):
        with pytest.raises(CudagraphError) as caught:
            use()
        assert str(caught.value) == "the graph of batch size 2 is closed; capture it again"


def test_leaving_the_pool_closes_its_graphs_also_after_an_error():
    twin = CpuBackend().pool()
    graph = capture(twin, lambda x: x + 1, torch.ones(2))

    def fail():
        with twin:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(CudagraphError):
        graph.replay()


def test_the_twin_is_a_backend():
    backend = open_backend("cpu")
    assert (backend.kind, backend.device) == ("cpu", "cpu")
    assert backend.event_timer() is None
    backend.synchronize()
    with backend.running():
        assert torch.is_inference_mode_enabled()
    state = backend.rng_state()
    drawn = torch.rand(3)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(ValueError, match="a backend is 'cuda' or 'cpu', not 'tpu'"):
        open_backend("tpu")

"""When graphs are captured, evicted, refused and dropped; what a capture leaves behind; on the CPU twin."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cudagraph import CaptureRefusal, GraphRunner, InputError
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import DeadTensorError
from pytest_cudagraph.model_watch import ModelWatch


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)).eval()


def runner(model, *example, **options):
    options.setdefault("backend", Noting())
    return GraphRunner(model, *(example or (torch.randn(2, 3),)), **options)


class Noting:
    """The twin, with a note of what was captured; refuses these batch sizes, with this error."""

    def __init__(self, *refuses, error=None):
        self._twin = open_backend("cpu")
        self.captured, self.refuses, self.pools = [], refuses, []
        self.error = error or CaptureRefusal("operation not permitted", hazard="host-sync", operation="aten.item")

    def __getattr__(self, name):
        return getattr(self._twin, name)

    def pool(self):
        self.pools.append(NotingPool(self, self._twin.pool()))
        return self.pools[-1]


class NotingPool:
    def __init__(self, backend, pool):
        self._backend, self._pool, self.closed = backend, pool, False

    def capture(self, model, args, kwargs, **options):
        graph, batch_size = self._pool.capture(model, args, kwargs, **options), options["batch_size"]
        if batch_size in self._backend.refuses:
            raise self._backend.error
        self._backend.captured.append(batch_size)
        return graph

    def close(self):
        self.closed = True
        self._pool.close()


def eager(model, x):
    with torch.inference_mode():
        return model(x)


def check(run, model, rows=2):
    x = torch.randn(rows, 3)
    torch.testing.assert_close(run(x), eager(model, x))


def test_all_sizes_are_captured_at_once_the_largest_first_in_one_pool(model):
    backend = Noting()
    run = runner(model, backend=backend, batch_sizes=(1, 8, 2))
    assert backend.captured == [8, 2, 1]
    assert len(backend.pools) == 1
    assert run.statistics.captures == 3
    assert all(size > 0 for size in run.statistics.memory_bytes.values())
    assert run.statistics.capture_ns > 0


def test_a_lazy_runner_captures_with_the_first_call_of_a_size(model):
    backend = Noting()
    run = runner(model, backend=backend, capture="lazy")
    assert backend.captured == []
    for rows in (3, 4, 1):
        check(run, model, rows)
    assert backend.captured == [4, 1]
    assert (run.statistics.hits, run.statistics.padded) == (2, 1)


def test_the_least_recently_used_graph_makes_room(model):
    backend = Noting()
    run = runner(model, backend=backend, batch_sizes=(1, 2, 4), max_graphs=2)
    assert backend.captured == [4, 2]
    for rows, there in [(4, [2, 4]), (1, [1, 4]), (4, [1, 4]), (2, [2, 4]), (1, [1, 2])]:
        check(run, model, rows)
        assert sorted(run.statistics.memory_bytes) == there
    found = run.statistics
    assert backend.captured == [4, 2, 1, 2, 1]
    assert (found.captures, found.recaptures, found.evictions, found.hits) == (5, 2, 3, 5)


def test_an_evicted_graph_is_closed_before_the_next_is_captured(model):
    order = []

    class Graph:
        receipt = None

        def close(self):
            order.append("close")

    run = runner(model, batch_sizes=(1, 2), max_graphs=1, capture="lazy")
    form = run._graphs.forms[0]
    form.open[2], form.kept[2], run._graphs._used[form, 2] = Graph(), (), None
    model.register_forward_pre_hook(lambda *_: order.append("capture"))
    run(torch.randn(1, 3))
    assert order[:2] == ["close", "capture"]


def test_captures_leave_state_and_generators_as_they_were(model):
    model.train().append(nn.Dropout(0.5))
    example, before, random = torch.randn(2, 3), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    runner(model, example, batch_sizes=(2, 4, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_captures_leave_a_generator_of_the_models_own_where_it_was():
    generator, same = (torch.Generator().manual_seed(3) for _ in range(2))

    def draws(x):
        return x + torch.rand(x.shape, generator=generator)

    run, x = runner(draws, torch.zeros(2, 3), batch_sizes=(2, 4)), torch.zeros(2, 3)
    for _ in range(2):
        torch.testing.assert_close(run(x), torch.rand(2, 3, generator=same))


def test_the_examples_are_left_alone_and_need_not_stay():
    example = torch.ones(2, 3)
    run = runner(lambda x: x.add_(1), example, capture="lazy")
    example.fill_(7)
    x = torch.zeros(2, 3)
    assert run(x)[0, 0] == 1
    assert example[0, 0] == 7


def test_a_refused_size_runs_eager_and_the_others_keep_their_graphs(model):
    backend = Noting(4)
    run = runner(model, backend=backend, batch_sizes=(2, 4))
    for rows in (2, 3, 4):
        check(run, model, rows)
    found = run.statistics
    assert backend.captured == [2]
    assert (found.hits, dict(found.eager)) == (1, {"capture refused": 2})
    assert found.refused == {4: "operation not permitted (aten.item)"}


@pytest.mark.parametrize("error", [InputError("an output is no tensor"), torch.OutOfMemoryError("CUDA out of memory")])
def test_other_reasons_why_there_is_no_graph(model, error):
    run = runner(model, backend=Noting(2, error=error), batch_sizes=(2,))
    check(run, model)
    assert run.statistics.refused == {2: str(error)}


def test_a_model_that_reads_on_the_host_runs_eager_with_the_line_that_does():
    run = runner(lambda x: x * x.sum().item(), batch_sizes=(2,))
    x = torch.randn(2, 3)
    assert torch.equal(run(x), x * x.sum().item())
    assert "test_graph_set.py" in run.statistics.refused[2]


@pytest.mark.parametrize("capture", ["now", "lazy"])
def test_a_strict_runner_raises_the_refusal(model, capture):
    backend = Noting(2)
    with pytest.raises(CaptureRefusal, match="operation not permitted"):
        runner(model, backend=backend, batch_sizes=(2,), strict=True, capture=capture)(torch.randn(2, 3))
    assert backend.pools[0].closed == (capture == "now")


def replace_data(model):
    model[0].weight.data = model[0].weight.data * 2


def replace_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def load_other(model):
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)


def replace_module(model):
    model[2] = nn.Linear(5, 2, bias=False)


def replace_in_table_with_none(model):
    model[2].weight.data = model[2].weight.data + 1


def give_a_bias(model):
    model[2].bias = nn.Parameter(torch.ones(2))


def take_the_bias(model):
    model[0].bias = None


def move_the_buffer(model):
    model[1].running_mean = model[1].running_mean + 1


def widen(model):
    model.bfloat16().float()


CHANGES = [
    replace_data, replace_parameter, load_other, replace_module, replace_in_table_with_none, give_a_bias, take_the_bias,
    move_the_buffer, widen,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured_again(model, change):
    backend = Noting()
    run = runner(model, backend=backend, batch_sizes=(2,))
    check(run, model)
    change(model)
    check(run, model)
    check(run, model)
    found = run.statistics
    assert backend.captured == [2, 2]
    assert [pool.closed for pool in backend.pools] == [True, False]
    assert (found.state_changes, found.recaptures, found.hits) == (1, 1, 3)


def test_memory_that_is_kept_but_read_in_another_shape_is_a_change():
    table = nn.Embedding(4, 2)
    run = runner(table, torch.tensor([0, 1]), batch_sizes=(2,))
    table.weight.data = table.weight.data[:3]
    run(torch.tensor([0, 1]))
    assert run.statistics.state_changes == 1


@dataclasses.dataclass(eq=True, unsafe_hash=True)
class Scale(nn.Module):
    """Equal to every other."""

    def __post_init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))


def test_what_is_equal_to_the_captured_is_a_change_too():
    model = nn.Module()
    model.scale = Scale()
    model.register_buffer("steps", torch.zeros(1))
    for name, equal in (("scale", Scale()), ("steps", torch.zeros(1))):
        watch = ModelWatch(model)
        assert not watch.has_changed()
        setattr(model, name, equal)
        assert watch.has_changed()


def transpose(weight):
    return weight.t()


def other_dtype(weight):
    return weight.view(torch.int32)


def shorter(weight):
    return weight[:2]


@pytest.mark.parametrize("reading", [transpose, other_dtype, shorter])
def test_the_same_memory_read_in_another_way_is_a_change(reading):
    layer = nn.Linear(3, 3, bias=False).requires_grad_(False)
    watch, address = ModelWatch(layer), layer.weight.data_ptr()
    assert not watch.has_changed()
    layer.weight.data = reading(layer.weight.data)
    assert layer.weight.data_ptr() == address
    assert watch.has_changed()


def test_a_square_weight_that_is_transposed_is_never_replayed_as_it_was(model):
    square = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    run = runner(square, batch_sizes=(2,))
    square[0].weight.data = square[0].weight.data.t()
    check(run, square)
    assert run.statistics.state_changes == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_the_flag_of_a_scripted_module_is_watched_too():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval())
    watch = ModelWatch(nn.Sequential(scripted))
    assert not watch.has_changed()
    scripted.train()
    assert watch.has_changed()


@pytest.mark.parametrize("part", [slice(None), 1], ids=["model", "one module"])
def test_another_training_flag_is_a_change(model, part):
    run = runner(model, batch_sizes=(4,))
    target = model[part] if isinstance(part, int) else model
    target.train()
    mean = model[1].running_mean.clone()
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(x), copy.deepcopy(model)(x))
    assert not torch.equal(model[1].running_mean, mean)  # once, by the replay
    assert model[1].num_batches_tracked == 1
    assert run.statistics.state_changes == 1


def test_values_written_in_place_are_seen_without_a_capture(model):
    run = runner(model, batch_sizes=(2,))
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    check(run, model)
    assert (run.statistics.state_changes, run.statistics.captures) == (0, 1)


def test_old_weights_live_as_long_as_the_watch_so_that_their_address_cannot_come_back(model):
    watch, old = ModelWatch(model), StorageWeakRef(model[0].weight.untyped_storage())
    assert not watch.has_changed()
    model[0].weight.data = torch.randn(5, 3)
    assert watch.has_changed()
    assert not old.expired()
    del watch
    assert old.expired()


def test_a_module_that_a_function_closes_over_is_watched_too(model):
    run = runner(lambda x: model(x) + 1, batch_sizes=(2,))
    replace_data(model)
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(x), eager(model, x) + 1)
    assert run.statistics.state_changes == 1


def test_a_refusal_is_forgotten_when_the_model_changes(model):
    backend = Noting(2)
    run = runner(model, backend=backend, batch_sizes=(2,))
    backend.refuses = ()
    check(run, model)
    assert run.statistics.hits == 0
    replace_data(model)
    check(run, model)
    assert (run.statistics.hits, run.statistics.refused) == (1, {})


def test_recapture_is_for_changes_that_no_call_can_see():
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x):
            return x * self.scale

    model = Scaled()
    run = runner(model, torch.ones(2, 1), batch_sizes=(2, 4))
    model.scale = 3.0
    assert run(torch.ones(2, 1)).tolist() == [[2.0], [2.0]]  # as documented: an attribute is baked into the graph
    run.recapture()
    assert run(torch.ones(2, 1)).tolist() == [[3.0], [3.0]]
    assert (run.statistics.captures, run.statistics.recaptures) == (4, 2)


def test_a_runner_without_a_watch_sees_a_change_when_it_is_told_to_look(model):
    run, x = runner(model, batch_sizes=(2,), watch="manual"), torch.randn(2, 3)
    before = run(x)
    replace_data(model)
    assert torch.equal(run(x), before)
    assert (run.renew_if_changed(), run.renew_if_changed()) == (True, False)
    check(run, model)
    assert (run.statistics.state_changes, run.statistics.recaptures) == (1, 1)


def test_what_a_model_makes_for_itself_while_it_is_captured_outlives_the_capture():
    class Lazy(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.full((3,), 4.0)
            return x + self.table

    model = Lazy()
    run = runner(model, torch.zeros(2, 3), batch_sizes=(2,))
    # Taken from the model again, so that eager starts as before; replays read what the warm-up has made.
    assert model.table is None
    assert [run(torch.zeros(2, 3))[0, 0].item() for _ in range(3)] == [4.0] * 3


def test_a_call_whose_graph_would_read_freed_memory_raises():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(3)

        def forward(self, x):
            self.total = self.total + 1
            return x + self.total

    run = runner(Grows(), torch.zeros(2, 3), batch_sizes=(2,))
    with pytest.raises(DeadTensorError, match="replay detected 1 dead tensor"):
        run(torch.zeros(2, 3))


class Anchored(nn.Module):
    """A cache for the batch size of the last call, in a plain attribute."""

    rows = None

    def forward(self, x):
        if self.rows != x.shape[0]:
            self.rows, self.anchors = x.shape[0], torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]
        return x + self.anchors


def test_a_cache_that_an_eager_call_at_another_size_drops_stays_for_the_graph_that_reads_it():
    model, same = Anchored(), Anchored()
    model(torch.ones(4, 3))
    with runner(model, torch.randn(4, 3), batch_sizes=(4,)) as run:
        for rows in (4, 9, 4, 3):
            x = torch.randn(rows, 3)
            assert torch.equal(run(x), same(x))
        assert (run.statistics.hits, run.statistics.state_changes) == (2, 0)

"""Models that write: to their arguments (no graph serves them), to their state (padding must not change what)."""

from __future__ import annotations

import copy
import ctypes

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cudagraph import CaptureRefusal, GraphRunner, InputError, IntegratedAOTCompiler
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.backends.capture_mode import is_capturing
from pytest_cudagraph.state.storages import SavedStorage

SLOTS = 4


def runner(model, *example, **options):
    return GraphRunner(model, *example, **{"device": "cpu", "batch_sizes": (1, 2, 4), **options})


class Writes(nn.Module):
    """A model with a buffer; how it writes to it is the test's."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("cache", torch.zeros(SLOTS, 3))

    def forward(self, x):
        return self.write(self.cache, x) + x


def first_rows(cache, x):
    rows = cache[: x.shape[0]]
    return rows.mul_(0.5).add_(x)


class LastPlace(nn.Module):
    """A cache with one place left: a call from any later position raises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(SLOTS, SLOTS))
        self.register_buffer("position", torch.tensor([SLOTS - 1]))

    def forward(self, x):
        self.cache[: len(x)].index_copy_(1, self.position, x[:, :1])
        self.position.add_(1)
        return self.cache[: len(x)].sum(1, keepdim=True)


def test_a_cache_with_one_place_left_is_captured_and_filled_by_the_first_replay():
    with runner(LastPlace(), torch.ones(4, 3)) as run:
        assert torch.equal(run(torch.full((4, 3), 5.0)), torch.full((4, 1), 5.0))
        assert run.statistics.hits == 1


def total(cache, x):
    cache.add_(x.sum(0))
    return x * 2


def counted(cache, x):
    cache += x.shape[0]
    return x * 2


def in_one_place(cache, x):
    cache[0] = x[-1]
    return x * 2


def in_slots(cache, x):
    cache.index_copy_(0, x[:, 0].abs().long() % SLOTS, x)
    return x * 2


def calls(*rows):
    source = torch.Generator().manual_seed(0)
    return [torch.randn(count, 3, generator=source) for count in rows]


def served_and_eager(model, run, xs):
    """The answers and the state after each call, served and eager."""
    alone, found, expected = copy.deepcopy(model), [], []
    with torch.inference_mode():
        for x in xs:
            found.append((run(x).clone(), model.cache.clone()))
            expected.append((alone(x).clone(), alone.cache.clone()))
    return found, expected


@pytest.mark.parametrize("options", [{}, {"check_rows": False}], ids=["checked", "trusted"])
@pytest.mark.parametrize("example", [torch.randn, torch.zeros])
@pytest.mark.parametrize("write", [first_rows, total, counted])
def test_a_model_whose_state_a_pad_row_would_change_is_not_padded(write, example, options):
    model = Writes(write).eval()
    run = runner(model, example(1, 3), **options)
    torch.testing.assert_close(*served_and_eager(model, run, calls(4, 3, 4, 2, 3)))
    assert run.statistics.eager == {"padding would change state": 2}
    assert run.statistics.not_padded == "a pad row would change what a call writes to cache"
    assert run.statistics.hits == 3


@pytest.mark.parametrize("write", [in_one_place, in_slots])
def test_a_model_to_whose_state_a_pad_row_makes_no_difference_is_padded(write):
    model = Writes(write).eval()
    run = runner(model, torch.randn(1, 3))
    torch.testing.assert_close(*served_and_eager(model, run, calls(4, 3, 2, 3)))
    assert (run.statistics.padded, run.statistics.not_padded) == (2, "")


def test_a_model_that_takes_no_new_values_is_tried_with_its_own():
    def picky(cache, x):
        if not is_capturing() and not x.eq(x[0, 0]).all():
            raise ValueError("all alike, please")
        return total(cache, x)

    run = runner(Writes(picky).eval(), torch.ones(1, 3))
    run(torch.ones(3, 3))
    assert run.statistics.eager == {"padding would change state": 1}


class Decoder(nn.Module):
    """Appends tokens of dimension 1 to a cache with some places."""

    def __init__(self, places):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, places))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens):
        self.cache.index_copy_(1, self.position + torch.arange(tokens.shape[1], device=tokens.device), tokens)
        self.position += tokens.shape[1]
        return tokens * 2


def decoder(places=64, **options):
    return runner(Decoder(places), torch.ones(1, 5), batch_dim=1, batch_sizes=(1, 5), check_rows=False, **options)


def test_a_pad_token_does_not_move_the_position_of_a_decoder_whose_rows_are_trusted():
    run = decoder()
    for length in (3, 1, 4):
        run(torch.ones(1, length))
    assert run.statistics.eager == {"padding would change state": 2}
    assert run._model.position == 8


def test_a_call_that_is_told_to_pad_is_padded_whatever_it_writes():
    run = decoder(pad=True)
    run(torch.ones(1, 3))
    assert (run.statistics.padded, run._model.position) == (1, 5)


@pytest.mark.parametrize("capture", ["now", "lazy"])
def test_without_padding_only_captured_sizes_are_served_and_nothing_is_tried(capture):
    run = decoder(pad=False, capture=capture)
    for length in (3, 5, 1):
        run(torch.ones(1, length))
    assert run.statistics.eager == {"padding is switched off": 1}
    assert (run.statistics.hits, run.statistics.padded, run._model.position) == (2, 0, 9)


def test_a_pad_row_that_cannot_be_tried_is_not_risked():
    def distinct(cache, x):
        if not is_capturing() and len(x) == 4 and x[2].eq(x[3]).all():
            raise ValueError("no row twice")
        return total(cache, x)

    run = runner(Writes(distinct).eval(), torch.randn(4, 3))
    run(torch.randn(3, 3))
    assert run.statistics.eager == {"padding would change state": 1}
    assert run.statistics.not_padded == "a call writes to cache, and with a pad row the model raises"


def test_learning_of_state_leaves_it_as_it_was():
    model = Writes(total).eval()
    runner(model, torch.randn(1, 3))
    assert not model.cache.any()


def step(x, cache):
    cache.mul_(0.5).add_(x)
    return cache * 2


@pytest.mark.parametrize("sizes", [(2,), (1, 2)])
def test_a_model_that_writes_to_an_argument_runs_eager_and_the_callers_tensor_is_written(sizes):
    run = runner(step, torch.zeros(2, 3), torch.zeros(2, 3), batch_sizes=sizes)
    x, cache = torch.ones(2, 3), torch.zeros(2, 3)
    for expected in (1.0, 1.5, 1.75):
        assert run(x, cache).eq(2 * expected).all()
        assert cache.eq(expected).all()
    assert run.statistics.eager == {"capture refused": 3}
    assert run.statistics.refused[2] == (
        "the call writes to its argument args[1], and a replay would write to a copy of it"
    )
    assert run.statistics.memory_bytes == {}


def test_strict_raises_where_an_argument_is_written():
    with pytest.raises(CaptureRefusal, match=r"writes to its argument kwargs\['cache'\]") as raised:
        runner(lambda x, cache: step(x, cache), torch.zeros(2, 3), kwargs={"cache": torch.zeros(2, 3)}, strict=True)
    assert (raised.value.hazard, raised.value.fix) == (
        "mutates-input",
        "clone the argument before writing to it, or keep what is updated as a buffer of the model",
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2) + 1,  # zeros stay zeros
        lambda x: x[0].zero_() + 1,
        lambda x: torch.relu_(x) + 1,
        lambda x: x.data.add_(1),
        lambda x: torch.add(x, 0, out=x) + 1,
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_is_seen_whatever_the_example_holds_and_however_it_is_written(write, mode):
    with mode():
        run = runner(write, torch.zeros(2, 3))
        run(torch.ones(2, 3))
    assert run.statistics.eager == {"capture refused": 1}


def test_an_argument_that_is_only_read_is_no_reason_to_refuse():
    run = runner(lambda x: x.t().clone().mul_(2).t() + x.view(-1).sum(), torch.zeros(2, 3))
    run(torch.randn(2, 3))
    assert run.statistics.hits == 1


def adds(batch):
    batch["hidden"] = batch["x"] * 2
    return batch["hidden"] + 1


def replaces(batch):
    batch["x"] = batch["x"] * 2
    return batch["x"] + 1


@pytest.mark.parametrize(("model", "name"), [(adds, "hidden"), (replaces, "x")])
def test_a_model_that_adds_to_a_callers_dict_runs_eager_and_the_dict_is_the_callers(model, name):
    run = runner(model, {"x": torch.zeros(2, 3)})
    batch = {"x": torch.ones(3, 3)}
    assert run(batch).eq(3).all()
    assert batch[name].eq(2).all()
    assert run.statistics.eager == {"capture refused": 1}
    assert f"the call writes to its argument args[0]['{name}']" in run.statistics.refused[4]


def test_a_model_that_uses_up_its_dict_is_served():
    run = runner(lambda batch: batch.pop("x") * 2, {"x": torch.zeros(2, 3)})
    for rows in (3, 4):
        assert run({"x": torch.ones(rows, 3)}).eq(2).all()
    assert (run.statistics.hits, run.statistics.padded) == (1, 1)


def test_a_changed_model_is_looked_at_anew():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.writes = True

        def forward(self, x):
            return (x.mul_(2) if self.writes else x * 2) * self.scale

    model = Model().eval()
    run = runner(model, torch.ones(2, 3))
    model.writes = False
    run.recapture()
    run(torch.ones(2, 3))
    assert run.statistics.hits == 1


def test_the_drop_in_compiler_gives_eagers_answers_and_state_of_both_kinds():
    with IntegratedAOTCompiler(device="cpu", batch_sizes=(1, 2, 4)) as compiler:
        model = Writes(first_rows).eval()
        served = compiler.compile_model_aot(model, torch.randn(1, 3), {}, "none")
        torch.testing.assert_close(*served_and_eager(model, served, calls(4, 3, 4)))
        assert served.infer(torch.randn(3, 3)).reason == "padding would change state"

        stepped = compiler.compile_model_aot(step, (torch.zeros(2, 3), torch.zeros(2, 3)), {}, "none")
        cache = torch.zeros(2, 3)
        result = stepped.infer(torch.ones(2, 3), cache)
        assert (result.path, result.reason) == ("eager", "capture refused")
        assert cache.eq(1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kwargs": [1]}, "kwargs is a mapping of keyword arguments; found list"),
        ({"clone_outputs": "no"}, "clone_outputs is True or False; found 'no'"),
        ({"strict": 1}, "strict is True or False; found 1"),
        ({"check_rows": None}, "check_rows is True or False; found None"),
        ({"kwargs": {1: 2}}, r"the names of kwargs are strings; found \[1\]"),
        ({"backend": "cuda"}, "backend is a Backend, or None for that of the device; found 'cuda'"),
        ({"pad": 1}, "pad is True, False or None; found 1"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(options, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        runner(lambda x: x + 1, torch.ones(2, 3), **options)


@pytest.mark.parametrize("option", ["max_graphs", "strict"])
def test_an_option_that_python_cannot_show_is_refused_too(option):
    nested = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(InputError, match=f"^{option} is "):
        runner(lambda x: x + 1, torch.ones(2, 3), **{option: nested})


def masks_by_address(x, mask):
    """As C code does that gets addresses: no operation of torch shows the read or the write."""
    y = x * 1
    values, kept = np.from_dlpack(y), np.from_dlpack(mask)
    for place in np.flatnonzero(~kept):
        ctypes.memset(values.ctypes.data + int(place) * values.itemsize, 0, values.itemsize)
    return y + 1


class KeepsInAParameter(nn.Module):
    def __init__(self, *, is_written):
        super().__init__()
        self.layer = nn.Linear(200, 200)
        self.kept = nn.Parameter(torch.zeros(4, 200, 200), requires_grad=False)
        self.is_written = is_written

    def forward(self, x):
        if self.is_written:
            self.kept[: len(x), 0] += self.layer(x)
        return self.kept[: len(x), 0] * 2 + self.layer(x)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_capture_copies_no_large_parameter_unless_a_call_writes_one(is_written, monkeypatch):
    copied, init = set(), SavedStorage.__init__

    def noting(saved, storage):
        copied.add(storage.data_ptr())
        init(saved, storage)

    monkeypatch.setattr(SavedStorage, "__init__", noting)
    model = KeepsInAParameter(is_written=is_written).eval()
    eager, x = copy.deepcopy(model), torch.randn(2, 200)
    before = copy.deepcopy(model.state_dict())
    with GraphRunner(model, x, batch_sizes=(1, 2), pad=False, backend=open_backend("cpu")) as run:
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        assert (model.kept.data_ptr() in copied, model.layer.weight.data_ptr() in copied) == (is_written, is_written)
        for _ in range(2):
            with torch.inference_mode():
                assert torch.equal(run(x), eager(x))
        assert torch.equal(model.kept, eager.kept)
        assert run.statistics.hits == 2


def test_a_write_by_address_is_served_eagerly_although_the_example_hides_it():
    x, all_kept = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with runner(masks_by_address, x, all_kept, batch_sizes=(1,)) as serving:
        assert serving(x, ~all_kept).tolist() == [[1, 1, 1]]
        (why,) = serving.statistics.refused.values()
        assert why.startswith("a tensor of (1, 3) changed, and no torch operation wrote it (aten.add) at ")

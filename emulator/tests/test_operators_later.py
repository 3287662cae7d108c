"""Operators whose kernel runs after the call: in a replay, or in a queue. What fails then is the device's error."""

from __future__ import annotations

import contextlib

import cuda_emulator
import pytest
import torch
from torch.nn import functional

SEEDS = range(8)
OUTSIDE = 9


@contextlib.contextmanager
def asserting_on_the_device():
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        yield
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        torch.cuda.synchronize()  # and every later call
    assert cuda_emulator.clear_error()


@pytest.fixture
def row():
    return torch.arange(4.0, device="cuda")


def outside():
    return torch.tensor([OUTSIDE], device="cuda")


@pytest.mark.parametrize(
    "call",
    [
        lambda row, index: row[index],
        lambda row, index: row.index_select(0, index),
        lambda row, index: row.gather(0, index),
        lambda row, index: row.clone().scatter_(0, index, 1.0),
        lambda row, index: row.clone().index_put_((index,), row[:1]),
        lambda row, index: functional.embedding(index, row[:, None]),
        lambda row, index: functional.cross_entropy(row[None], index),
    ],
    ids=["index", "index_select", "gather", "scatter", "index_put", "embedding", "cross_entropy"],
)
def test_an_index_out_of_range_is_an_assert_on_the_device(row, call, capfd):
    with asserting_on_the_device():
        call(row, outside())
    assert "Assertion `aten::" in capfd.readouterr().err


def test_a_shape_that_does_not_fit_is_an_error_of_the_call(row):
    with pytest.raises(IndexError, match="Dimension out of range"):
        row.gather(2, outside())
    with pytest.raises(RuntimeError, match="must match"):
        row + row[:3]
    torch.cuda.synchronize()


def test_a_replay_asserts_on_its_new_input(row):
    index = torch.zeros(1, dtype=torch.long, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row[index]
    graph.replay()
    index.fill_(OUTSIDE)
    with asserting_on_the_device():
        graph.replay()


def test_an_assert_in_a_queue_is_the_error_of_the_call_that_waits(row):
    with cuda_emulator.asynchronous(0):
        row[outside()]
        with asserting_on_the_device():
            torch.cuda.synchronize()


def test_sizes_that_depend_on_data_wait_for_their_stream(row):
    for seed in SEEDS:
        with cuda_emulator.asynchronous(seed):
            doubled = row * 2
            assert doubled[doubled > 2].tolist() == [4, 6]


def test_numbers_are_drawn_in_the_order_of_the_launches():
    def draws():
        torch.cuda.manual_seed(5)
        with torch.cuda.stream(torch.cuda.Stream()):
            first = torch.rand(3, device="cuda")
        second = functional.dropout(torch.ones(8, device="cuda"), 0.5)
        torch.cuda.synchronize()
        return first.tolist() + second.tolist()

    want = draws()
    for seed in SEEDS:
        with cuda_emulator.asynchronous(seed):
            assert draws() == want


def test_a_number_on_the_host_is_read_at_the_launch(row):
    for seed in SEEDS:
        number = torch.tensor(2.0)
        with cuda_emulator.asynchronous(seed):
            doubled = row * number
            number.fill_(100)
            assert doubled.tolist() == [0, 2, 4, 6]


def test_an_integer_division_by_zero_is_no_error(row):
    whole = row.long()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.remainder(whole, whole)
    graph.replay()
    torch.cuda.synchronize()

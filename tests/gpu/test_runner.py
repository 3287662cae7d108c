"""The runner on a GPU: a graph where one fits, eager with the reason where none does, nothing kept afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.gpu.small_models import Mlp, ReadsTheHost

from pytest_cudagraph import GraphRunner
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError


@pytest.fixture
def model():
    return Mlp().cuda().eval()


def rows(count, features=64):
    return torch.randn(count, features, device="cuda")


def eager(model, x):
    with torch.inference_mode():
        return model(x)


def test_calls_are_served_by_graphs_exactly_or_padded(model):
    with GraphRunner(model, rows(2), batch_sizes=(1, 4, 8)) as run:
        for count in (1, 3, 4, 8, 5):
            x = rows(count)
            torch.testing.assert_close(run(x), eager(model, x))
        told = run.statistics
    assert (told.hits, told.padded, told.padding_rows) == (3, 2, 4)
    assert dict(told.replays) == {1: 1, 4: 2, 8: 2}
    assert not told.eager, told.lines()
    assert told.device == "cuda:0"
    # The largest batch is captured first. The others may fit into what it has left in the pool.
    assert told.memory_bytes[8] > 0
    assert all(told.memory_bytes[size] >= 0 for size in (1, 4))


def test_what_no_graph_fits_runs_eager_and_the_reason_is_counted():
    model = torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda().eval()
    with GraphRunner(model, rows(2), batch_sizes=(2, 4)) as run:
        for x in (rows(5), rows(2).unsqueeze(1), rows(0)):
            torch.testing.assert_close(run(x), eager(model, x))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            run(rows(2))
        assert dict(run.statistics.eager) == {
            "beyond the largest batch size": 1,
            "other shape or dtype": 1,
            "no rows": 1,
            "other autocast": 1,
        }
        assert not run.statistics.replays


class Decode(torch.nn.Module):
    """A row of the cache per sequence."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 64))

    def forward(self, x):
        return self.cache[: x.shape[0]].mul_(0.5).add_(x) * 2


def test_a_cache_that_a_pad_row_would_change_is_not_padded():
    model, alone = Decode().cuda().eval(), Decode().cuda().eval()
    with GraphRunner(model, rows(2), batch_sizes=(4, 8)) as run:
        for count in (8, 3, 8, 4):
            x = rows(count)
            torch.testing.assert_close(run(x), eager(alone, x))
        torch.testing.assert_close(model.cache, alone.cache)
        assert dict(run.statistics.eager) == {"padding would change state": 1}


def test_a_cache_that_is_handed_in_is_written_by_eager():
    def step(x, cache):
        return cache.mul_(0.5).add_(x) * 2

    cache, alone = torch.zeros(4, 64, device="cuda"), torch.zeros(4, 64, device="cuda")
    with GraphRunner(step, rows(4), torch.zeros_like(cache), batch_sizes=(4,)) as run:
        for _ in range(3):
            x = rows(4)
            torch.testing.assert_close(run(x, cache), eager(lambda x: step(x, alone), x))
        torch.testing.assert_close(cache, alone)
        assert dict(run.statistics.eager) == {"capture refused": 3}


def test_a_refused_capture_runs_eager_with_cudas_words_and_the_device_goes_on(model):
    refused = ReadsTheHost()
    with GraphRunner(refused, rows(2), batch_sizes=(2,)) as run:
        x = rows(2)
        torch.testing.assert_close(run(x), eager(refused, x))
        assert dict(run.statistics.eager) == {"capture refused": 1}
        assert "operation not permitted when stream is capturing" in run.statistics.refused[2]
    with GraphRunner(model, rows(2), batch_sizes=(2,)) as run:
        x = rows(2)
        torch.testing.assert_close(run(x), eager(model, x))
        assert run.statistics.hits == 1


def test_a_strict_runner_raises_the_refusal(model):
    with pytest.raises(CaptureRefusal, match="operation not permitted when stream is capturing"):
        GraphRunner(ReadsTheHost(), rows(2), batch_sizes=(2,), strict=True)


def test_an_answer_stays_as_it_was_when_the_next_call_comes(model):
    x, y = rows(2), rows(2)
    with GraphRunner(model, x, batch_sizes=(2,)) as run:
        first = run(x)
        kept = first.clone()
        run(y)
        assert torch.equal(first, kept)
    assert torch.equal(first, kept), "it lay in memory that went with the graphs"


def test_a_batch_size_is_captured_with_its_first_call_where_that_was_asked_for(model):
    with GraphRunner(model, rows(2), batch_sizes=(1, 2, 4), capture="lazy") as run:
        assert run.statistics.captures == 0
        x = rows(4)
        torch.testing.assert_close(run(x), eager(model, x))
        assert list(run.statistics.memory_bytes) == [4]


def test_a_closed_runner_has_given_its_memory_back_and_says_so(model, reserved):
    x = rows(64, 64)
    with GraphRunner(model, x, batch_sizes=(64,)) as run:
        run(x)
    before = reserved()
    with GraphRunner(model, x, batch_sizes=(64, 32)) as run:
        run(x)
    assert reserved() <= before
    with pytest.raises(CudagraphError, match="closed"):
        run(x)


def test_answers_that_are_still_computed_when_the_runner_closes_come_out_right(model):
    inputs, stream = [rows(count) for count in (2, 4, 3)], torch.cuda.Stream()
    with GraphRunner(model, rows(2), batch_sizes=(2, 4)) as run:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            answers = [run(x) for x in inputs]
    taken = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(16)]  # the memory that has become free
    torch.cuda.synchronize()
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer, eager(model, x))
    assert all(each.eq(7).all() for each in taken)


def test_calls_on_two_streams_in_turn_share_the_graphs_buffers_one_after_the_other(model, orders):
    inputs, streams = [rows(4) for _ in range(8)], [torch.cuda.Stream(), torch.cuda.Stream()]
    with GraphRunner(model, rows(4), batch_sizes=(4,)) as run:
        for order in orders:
            with order:
                torch.cuda.synchronize()
                answers = []
                for turn, x in enumerate(inputs):
                    with torch.cuda.stream(streams[turn % 2]):
                        answers.append(run(x))
                torch.cuda.synchronize()
            for x, answer in zip(inputs, answers, strict=True):
                torch.testing.assert_close(answer, eager(model, x))


def test_without_copies_the_next_call_overwrites_an_answer(model):
    x, y = rows(2), rows(2)
    with GraphRunner(model, x, batch_sizes=(2,), clone_outputs=False) as run:
        first = run(x)
        torch.testing.assert_close(first, eager(model, x))
        run(y)
        torch.testing.assert_close(first, eager(model, y))


def test_graphs_that_make_room_for_others_give_their_memory_back(model, reserved):
    levels = []
    with GraphRunner(model, rows(8), batch_sizes=(1, 2, 4, 8), max_graphs=1) as run:
        for _ in range(4):
            for count in (1, 2, 4, 8):
                x = rows(count)
                torch.testing.assert_close(run(x), eager(model, x))
            levels.append(reserved())
        assert len(run.statistics.memory_bytes) == 1
        assert run.statistics.evictions == 16
    assert levels[-1] == levels[1], levels


def test_refused_captures_hold_no_memory(reserved):
    levels = []
    for _ in range(4):
        with GraphRunner(ReadsTheHost(), rows(64), batch_sizes=(64,)) as run:
            assert run.statistics.refused
        levels.append(reserved())
    assert levels[-1] == levels[1], levels


def test_a_change_that_no_check_sees_is_served_after_recapture():
    class Scales(torch.nn.Module):
        factor = 2.0

        def forward(self, x):
            return x * self.factor

    model, x = Scales(), rows(2)
    with GraphRunner(model, x, batch_sizes=(2,)) as run:
        model.factor = 3.0
        assert torch.equal(run(x), x * 2)
        run.recapture()
        assert torch.equal(run(x), x * 3)


def serve(run, model, seed, turns):
    """Calls on a stream of this thread's own, each answer compared with eager."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(turns):
            x = torch.randn(1 + turn % 4, 64, device="cuda", generator=generator)
            torch.testing.assert_close(run(x), eager(model, x))


@pytest.mark.parametrize(("options", "turns"), [({}, 100), ({"capture": "lazy", "max_graphs": 2}, 8)])
def test_threads_on_streams_of_their_own_get_their_own_answers(model, options, turns):
    """Also while one of them captures, with or without a graph that makes room for it."""
    with GraphRunner(model, rows(2), batch_sizes=(1, 2, 4), **options) as run:
        torch.cuda.synchronize()
        with ThreadPoolExecutor(4) as threads:
            served = [threads.submit(serve, run, model, seed, turns) for seed in range(4)]
        for each in served:
            each.result()
        assert run.statistics.calls == 4 * turns
        assert not run.statistics.eager, run.statistics.lines()

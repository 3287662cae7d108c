"""Calls are recorded right, whatever the call does, and a runner's own word says what served them."""

import asyncio
import itertools
import os
import threading

import pytest
import torch
from tests.fake_clock import FakeClock
from torch import nn

from pytest_cudagraph import CallMonitor, GraphRunner, create_integrated_compiler
from pytest_cudagraph.errors import ExpectationMissed, InputError
from pytest_cudagraph.serving.calls.call_summary import OTHERS

MS = 1_000_000


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 1_790_000_000 * 1000 * MS)
    return FakeClock()


@pytest.fixture
def monitor(clock):
    return CallMonitor(clock=clock)


@pytest.fixture
def spend(clock):
    def work(ms):
        clock.time_ns += ms * MS

    return work


def facts(monitor):
    """Name, duration in ms, tokens, batch size, failure."""
    return [
        (*each[:1], each.duration_ns / MS, each.tokens, each.batch_size, each.failure) for each in monitor.records()
    ]


def test_a_watched_call_gives_its_result_and_is_recorded(monitor, spend):
    @monitor.watch("decode", tokens=len, batch_size=lambda rows, ms: rows)
    def decode(rows, ms):
        """Decodes."""
        spend(ms)
        return "token" * rows

    assert decode(2, ms=3) == "tokentoken"
    assert (decode.__name__, decode.__doc__) == ("decode", "Decodes.")
    assert facts(monitor) == [("decode", 3.0, 10, 2, "")]


def test_a_measured_block_may_learn_its_tokens_within(monitor, spend):
    with monitor.measure("decode", batch_size=4) as call:
        spend(2)
        call.tokens = torch.tensor(7)
    assert facts(monitor) == [("decode", 2.0, 7, 4, "")]


def test_a_failure_is_named_and_raised_and_is_in_no_duration(monitor, spend):
    @monitor.watch("decode", tokens=1)
    def decode():
        spend(5)
        raise KeyError("a")

    with pytest.raises(KeyError, match="a"):
        decode()
    assert facts(monitor) == [("decode", 5.0, 1, None, "KeyError")]
    found = monitor.summary()["decode"]
    assert (found.calls, found.failures, found.tokens, found.p50_ns) == (1, {"KeyError": 1}, 0, None)


def test_a_coroutine_is_timed_from_start_to_end_and_beside_another(monitor, spend):
    @monitor.watch("fetch")
    async def fetch(ms):
        spend(ms)
        await asyncio.sleep(0)
        spend(ms)
        return ms

    async def both():
        return await asyncio.gather(fetch(1), fetch(10))

    assert asyncio.run(both()) == [1, 10]
    # Each also waits for a half of the other.
    assert facts(monitor) == [("fetch", 12.0, 0, None, ""), ("fetch", 21.0, 0, None, "")]


class Stream:
    """A watched generator and its consumer, who takes a second for each item."""

    def __init__(self, monitor, spend):
        self.closed = []

        @monitor.watch("stream", tokens=len)
        def stream(items):
            try:
                for item in items:
                    spend(2)
                    sent = yield item
                    if sent == "stop":
                        return "stopped"
            finally:
                self.closed.append(True)
            return "ended"

        self.make, self.spend = stream, spend


def test_a_generator_is_one_call_and_its_time_is_its_own(monitor, spend):
    stream = Stream(monitor, spend)
    for item in stream.make(["a", "bc"]):
        spend(1000)
        assert item
    assert facts(monitor) == [("stream", 4.0, 3, None, "")]


def test_a_generator_keeps_what_is_sent_thrown_and_returned(monitor, spend):
    stream = Stream(monitor, spend)

    def returned():
        generator = stream.make(["a", "b"])
        next(generator)
        try:
            generator.send("stop")
        except StopIteration as end:
            return end.value

    assert returned() == "stopped"
    thrown = stream.make(["a"])
    next(thrown)
    with pytest.raises(ValueError, match="in"):
        thrown.throw(ValueError("in"))
    assert [each[1:] for each in facts(monitor)] == [(2.0, 1, None, ""), (2.0, 1, None, "ValueError")]


def test_a_generator_left_half_way_is_one_call_without_failure_and_one_never_begun_is_none(monitor, spend):
    stream = Stream(monitor, spend)
    for _ in stream.make(["a", "b", "c"]):
        break
    stream.make(["a"])
    assert stream.closed == [True]
    assert facts(monitor) == [("stream", 2.0, 1, None, "")]


def test_an_async_generator_is_one_call_and_closes_when_it_is_left(monitor, spend):
    closed = []

    @monitor.watch("stream", tokens=len)
    async def stream(items):
        try:
            for item in items:
                spend(2)
                yield item
            raise LookupError
        finally:
            closed.append(True)

    async def consume():
        left = stream(["a", "b"])
        async for _ in left:
            spend(1000)
            break
        await left.aclose()
        with pytest.raises(LookupError):
            [each async for each in stream(["a", "b"])]

    asyncio.run(consume())
    assert closed == [True, True]
    assert facts(monitor) == [("stream", 2.0, 1, None, ""), ("stream", 4.0, 2, None, "LookupError")]


def test_a_recursive_function_is_one_call_for_each_depth(monitor, spend):
    @monitor.watch("tree")
    def tree(depth):
        spend(1)
        return tree(depth - 1) if depth else 0

    tree(3)
    assert [each[1] for each in facts(monitor)] == [1.0, 2.0, 3.0, 4.0]


def test_a_clock_that_goes_back_counts_the_call_with_no_time(monitor, clock):
    with monitor.measure("decode"):
        clock.time_ns -= 5 * MS
    assert facts(monitor) == [("decode", 0.0, 0, None, "")]


def test_a_clock_without_a_number_or_with_fractions_loses_no_call(monkeypatch, tmp_path):
    readings = itertools.chain([0.0, 1e6, float("nan"), 3.5e6, float("inf"), 5e6], itertools.repeat(float("nan")))
    monkeypatch.setattr(FakeClock, "now_ns", lambda clock: next(readings))
    monitor = CallMonitor(clock=FakeClock())
    for _ in range(3):
        with monitor.measure("decode", tokens=1):
            pass
    assert [each[1] for each in facts(monitor)] == [0.0, 0.0, 0.0]
    assert CallMonitor.merged(monitor.export(tmp_path)).summary()["decode"].calls == 3


def test_eight_threads_lose_nothing():
    monitor, start = CallMonitor(keep=10), threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(1_000):
            with monitor.measure("decode", tokens=1):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = monitor.summary()["decode"]
    assert (found.calls, found.tokens, len(monitor.records())) == (8_000, 8_000, 10)


def test_a_switched_off_monitor_records_nothing_and_may_be_switched_on_later(monitor):
    monitor.disable()
    watched = monitor.watch("decode")(lambda: 1)
    watched()
    with monitor.measure("decode") as call:
        call.tokens = 5
    assert monitor.summary() == {}
    monitor.enable()
    watched()
    assert monitor.summary()["decode"].calls == 1
    monitor.clear()
    assert (monitor.summary(), monitor.records()) == ({}, [])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": -1}, "tokens must be a whole number of 0 or more; found -1"),
        ({"tokens": float("nan")}, "tokens must be a whole number of 0 or more; found nan"),
        ({"batch_size": 0}, "batch_size must be a whole number of 1 or more; found 0"),
    ],
)
def test_tokens_that_are_no_number_are_an_error_and_the_call_is_counted(monitor, given, text):
    with pytest.raises(InputError) as caught, monitor.measure("decode", **given):
        pass
    assert str(caught.value) == text
    # The block's own error is more important.
    with pytest.raises(OSError, match="own"), monitor.measure("decode", **given):
        raise OSError("own")
    assert monitor.summary()["decode"].calls == 2


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: CallMonitor(keep=-1), "keep must be a whole number of 0 or more; found -1"),
        (lambda: CallMonitor().watch(3), "a name of calls is a text, as in watch('decode'); found 3"),
        (lambda: CallMonitor().summary(0), "last_n must be a whole number of 1 or more; found 0"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_sentence(use, text):
    with pytest.raises(InputError) as caught:
        use()
    assert str(caught.value) == text


def test_names_and_failures_without_end_are_counted_together(monitor):
    for number in range(1_200):
        error = type(f"Error{number}", (Exception,), {})
        with pytest.raises(error), monitor.measure(f"request {number}"):
            raise error
        with pytest.raises(error), monitor.measure("same"):
            raise error
    found = monitor.summary()
    assert len(found) == 1_001
    assert sum(each.calls for each in found.values()) == 2_400
    assert len(found["same"].failures) == 101
    assert found["same"].failures[OTHERS] == 1_100


def test_a_summary_of_the_last_calls_leaves_the_earlier_ones_out(monitor, spend):
    for ms in (100, 100, 1, 3):
        with monitor.measure("decode"):
            spend(ms)
    found = monitor.summary(last_n=2)["decode"]
    assert (found.calls, found.minimum_ns, found.maximum_ns) == (2, 1 * MS, 3 * MS)


def test_rates_are_tokens_by_the_time_of_all_calls_and_by_the_durations_for_a_user(monitor, spend):
    for _ in range(4):
        with monitor.measure("decode", tokens=8, batch_size=8):
            spend(10)
        spend(15)
    found = monitor.summary()["decode"]
    assert found.tokens_per_s == pytest.approx(32 / 0.085)
    assert found.calls_per_s == pytest.approx(4 / 0.085)
    assert found.tokens_per_s_per_user == pytest.approx(100)
    assert (found.rows, found.started_at_s) == (32, 1_790_000_000)


def test_a_summary_in_words(golden):
    clock, lines = FakeClock(), []
    monitor = CallMonitor(clock=clock)
    for ms in range(1, 101):
        with monitor.measure("decode", tokens=4, batch_size=4) as call:
            clock.time_ns += ms * MS / 10
            call.note("graph", "") if ms > 3 else call.note("eager", "other shape or dtype")
    with pytest.raises(RuntimeError), monitor.measure("decode"):
        raise RuntimeError
    with monitor.measure("load"):
        clock.time_ns += 3_200 * MS
    for each in monitor.summary().values():
        lines += each.lines()
    golden("monitor/summary.txt", "\n".join(lines))


def runner(**options):
    return GraphRunner(nn.Linear(4, 4).eval(), torch.randn(1, 4), batch_sizes=(1, 2), device="cpu", **options)


def test_what_served_a_call_is_what_the_runner_counted(monitor):
    with runner() as run:
        with monitor.measure("request"):
            for rows in (1, 2, 3, 1):
                with monitor.measure("decode"):
                    run(torch.randn(rows, 4))
        run(torch.randn(1, 4))
    found = monitor.summary()
    for name in ("decode", "request"):
        assert found[name].served == {"graph": 3, "eager": 1}
        assert found[name].reasons == {"beyond the largest batch size": 1}
        assert found[name].graph_hit_ratio == 0.75
    assert [each.served for each in monitor.records()][2] == {("eager", "beyond the largest batch size"): 1}


def test_a_call_without_a_runner_says_nothing_of_graphs(monitor):
    with monitor.measure("decode"):
        nn.Linear(4, 4)(torch.randn(1, 4))
    assert monitor.records()[0].served is None
    assert monitor.summary()["decode"].graph_hit_ratio is None


def test_a_model_call_of_another_thread_or_task_is_not_this_calls(monitor):
    async def served(run, name, rows):
        with monitor.measure(name):
            await asyncio.sleep(0)
            await asyncio.to_thread(run, torch.randn(rows, 4))

    async def both(run):
        await asyncio.gather(served(run, "by graph", 1), served(run, "eager", 3))

    with runner() as run:
        with monitor.measure("beside"):
            other = threading.Thread(target=run, args=(torch.randn(1, 4),))
            other.start()
            other.join()
        asyncio.run(both(run))
    found = monitor.summary()
    assert {name: each.served for name, each in found.items()} == {
        "beside": {}, "by graph": {"graph": 1}, "eager": {"eager": 1},
    }  # fmt: skip


def test_the_drop_in_compiler_says_each_path_once(monitor):
    model, x = nn.Linear(4, 4).eval(), torch.randn(1, 4)
    with create_integrated_compiler(batch_sizes=(1,), device="cpu") as compiler:
        handle = compiler.compile_model_aot(model, (x,), None, "none")
        with monitor.measure("decode"):
            handle(x)
            handle(torch.randn(2, 4))
        with monitor.measure("other"):
            compiler.try_optimized_inference(nn.Linear(4, 4), x)
    found = monitor.summary()
    assert found["decode"].served == {"graph": 1, "eager": 1}
    assert found["other"].reasons == {"not a model of this compiler": 1}


def test_synchronized_calls_wait_for_the_gpu_at_both_ends_and_say_so(monitor, monkeypatch, spend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: spend(7))
    with monitor.measure("decode", synchronize=True):
        spend(1)
    monitor.watch("decode", synchronize=True)(spend)(1)
    with monitor.measure("decode"):
        spend(1)
    assert [(each[1]) for each in facts(monitor)] == [8.0, 8.0, 1.0]
    assert [each.is_synchronized for each in monitor.records()] == [True, True, False]
    assert monitor.summary()["decode"].synchronized == 2


def test_an_error_of_the_gpu_at_the_end_is_a_failure_of_the_call(monitor, monkeypatch):
    def fail():
        if begun:
            raise RuntimeError("CUDA error")

    begun = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="CUDA error"), monitor.measure("decode", synchronize=True):
        begun.append(True)
    assert monitor.summary()["decode"].failures == {"RuntimeError": 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_starts_with_no_calls(monitor):
    with monitor.measure("decode"):
        pass
    with monitor._lock:  # as another thread may hold it
        child = os.fork()
        if not child:
            os._exit(len(monitor.summary()))
    assert os.waitpid(child, 0)[1] == 0
    assert monitor.summary()["decode"].calls == 1


def test_expectations_that_hold_give_the_summary(monitor, spend):
    with monitor.measure("decode", tokens=1):
        spend(10)
    assert monitor.expect("decode", max_p50_ms=10, min_tokens_per_s=100, max_failures=0).calls == 1


def test_expectations_that_are_missed_say_so_with_the_evidence(monitor, spend, golden):
    texts = []

    def missed(name, **limits):
        with pytest.raises(ExpectationMissed) as caught:
            monitor.expect(name, **limits)
        texts.append(str(caught.value))

    missed("decode")
    for ms in (2, 3, 3):
        with monitor.measure("decode", tokens=4) as call:
            spend(ms)
            call.note("eager", "other autocast") if ms == 2 else call.note("graph", "")
    with pytest.raises(ValueError), monitor.measure("load"):
        raise ValueError
    missed("decode", max_p50_ms=2, min_tokens_per_s=2_000, min_graph_hit_ratio=1.0, min_calls=4)
    missed("load", max_p50_ms=2, min_tokens_per_s=1, min_graph_hit_ratio=0.5)
    missed("decode", max_p50_ms=float("nan"))
    missed("prefill")
    golden("monitor/expect.txt", "\n\n".join(texts))

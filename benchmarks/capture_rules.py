"""The rules of CUDA's stream capture, as torch on this machine's device shows them: one line per rule.

    python benchmarks/capture_rules.py                   print each rule and its answer
    python benchmarks/capture_rules.py --compare FILE    print the rules whose answers differ from FILE, and exit 1

Each rule runs in a process of its own, because a refused capture can spoil the process. The answers have no addresses
and no times. The script needs torch and nothing of this project. The lines of the emulated CUDA device are in
``benchmarks/evidence/capture_rules-emulated.txt``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RULE_LIMIT_S = 30.0
RUNNING_AT_ONCE = 8
MODES = ("global", "thread_local", "relaxed")
MIB = 1 << 20

DOUBTFUL: Mapping[str, str] = {
    "pin_memory": "torch may ask for pinned memory in relaxed mode, or not",
    "inverse": "the library of linear algebra may refuse the capture before torch reads its error code",
    "synchronize another stream": "CUDA's pages do not say whether a wait for a stream that does not capture is unsafe",
    "query another stream": "the same for a query",
    "the default stream waits for the capture": "the pages name error 906 and error 900 for the legacy stream",
    "a side stream that waits and does nothing": "the pages call work unjoined, and not a wait",
    "one capture waits for another": "902 is documented. Which of the two captures becomes invalid is not",
    "end in another thread, global": "908 is documented. Whether the capture stays open is not",
    "end in another thread, thread_local": "the same",
    "free memory in another thread, global": "the pages call unsafe what may wait. Whether cudaFree counts is not said",
    "synchronize in another thread, thread_local": "a device with a capture must not be waited for, in any mode or not",
    "synchronize in another thread, relaxed": "the same",
    "item in another thread, global": "it depends on how torch gets the host's memory: from a cache or from CUDA",
    "replay of another graph in a capture": "the pages do not say that a launch becomes a child graph",
}
"""Rules that neither torch's source nor CUDA's pages decide, and why."""

RULES: dict[str, Callable[[], str]] = {}


def rule(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function that returns the answer to one rule."""

    def keep(ask: Callable[[], str]) -> Callable[[], str]:
        if name in RULES or ": " in name:
            raise ValueError(f"a rule's name is unique and has no ': '; found {name!r}")
        RULES[name] = ask
        return ask

    return keep


def ones(count: int = 1024) -> torch.Tensor:
    return torch.ones(count, device="cuda")


def plus_one() -> torch.Tensor:
    return ones() + 1


def error_text(error: BaseException) -> str:
    """Class and first line, without the place in torch's source."""
    # The amounts in torch's message differ between machines.
    first = "" if isinstance(error, torch.OutOfMemoryError) else first_line(error)
    return f"{type(error).__name__}: {first}"


def first_line(message: object) -> str:
    first = (str(message).strip().splitlines() or [""])[0]
    return re.split(r" at \"|, please report| \(Triggered", first)[0]


def outcome(call: Callable[[], object], done: str = "allowed") -> str:
    try:
        call()
    except Exception as error:
        return error_text(error)
    return done


def captured(body: Callable[[], object], *, warm: bool = True, graph: Any = None, **options: Any) -> str:
    """Capture ``body``: ``captured``, or the error that it raised and the error that the end of the capture raised."""
    if warm:
        with contextlib.suppress(Exception):
            body()
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    inside: list[Exception] = []
    try:
        with torch.cuda.graph(graph, **options):
            try:
                body()
            except Exception as error:
                inside.append(error)
                raise
    except Exception as error:
        if not inside:
            return f"refused at the end, {error_text(error)}"
        at_end = "" if error is inside[0] else f"; at the end {error_text(error)}"
        return f"refused, {error_text(inside[0])}{at_end}"
    return "captured"


def captures(name: str, body: Callable[..., object], *makes: Callable[[], Any], **options: Any) -> None:
    """Register the rule whether a capture takes ``body``. Its arguments are made before the capture."""

    def ask() -> str:
        made = [make() for make in makes]
        return captured(lambda: body(*made), **options)

    rule(name)(ask)


def host() -> torch.Tensor:
    return torch.ones(8)


def pinned() -> torch.Tensor:
    return torch.ones(8).pin_memory()


def in_thread(call: Callable[[], object]) -> str:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(outcome(call)))
    thread.start()
    thread.join()
    return told[0]


def refused_graph(**options: Any) -> Any:
    """A graph whose capture was refused. Its body allocated 20 MiB."""
    graph, x = torch.cuda.CUDAGraph(), ones()
    captured(lambda: (torch.zeros(20 * MIB, dtype=torch.uint8, device="cuda"), x.sum().item()), graph=graph, **options)
    gc.collect()
    return graph


def pool_mib(*handles: Any) -> int:
    held = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in set(map(tuple, handles))]
    return sum(s["total_size"] for s in held) // MIB


def private_mib() -> int:
    """Of all pools but the one of eager work."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)) // MIB


def numbers(*tensors: torch.Tensor) -> str:
    return ", ".join(str(tensor.flatten()[0].item()) for tensor in tensors)


# What a capture is


@rule("a capture computes nothing, a replay does")
def computes_nothing() -> str:
    x, out, graph = ones(), torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
    told = captured(lambda: out.add_(x), warm=False, graph=graph)
    before = numbers(out)
    graph.replay()
    return f"{told}; the output was {before}, and after a replay {numbers(out)}"


@rule("a replay reads and writes the captured addresses")
def frozen_addresses() -> str:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    x.fill_(5)
    graph.replay()
    in_place, kept, x = numbers(y), x, ones() * 9
    graph.replay()
    return f"{numbers(kept)} written in place {in_place}, then {numbers(x)} under the same name {numbers(y)}"


@rule("is_current_stream_capturing")
def says_it_captures() -> str:
    told = []
    captured(lambda: (told.append(torch.cuda.is_current_stream_capturing()), ones(4)), warm=False)
    told.append(torch.cuda.is_current_stream_capturing())
    return f"inside {told[0]}, afterwards {told[1]}"


@rule("a graph without nodes")
def empty_graph() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = captured(lambda: None)
    return f"{told}; warning {first_line(caught[0].message) if caught else 'none'}"


@rule("an exception of Python in a capture")
def python_error() -> str:
    x, graph = ones(), torch.cuda.CUDAGraph()

    def body() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("of the model")

    told = captured(body, warm=False, graph=graph)
    here = torch.cuda.current_stream() == torch.cuda.default_stream()
    return f"{told}; the default stream is current {here}; replay {outcome(graph.replay)}, the value is {numbers(x)}"


# Reads of the host


def reads(name: str, read: Callable[[torch.Tensor], object]) -> None:
    captures(name, read, ones)


def masked_write(x: torch.Tensor) -> None:
    x[x > 2] = 0.0


def swallowed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        x.sum().item()
    return x + 1


reads("item", lambda x: x.sum().item())
reads("item, its error is caught, and work follows", swallowed)
reads("a branch on a tensor", lambda x: bool(x.sum() > 0))
reads("tolist", lambda x: x.tolist())
reads("cpu", lambda x: x.cpu())
reads("repr", repr)
reads("equal", lambda x: torch.equal(x, x))
reads("nonzero", lambda x: x.nonzero())
reads("where with one argument", lambda x: torch.where(x > 0))
reads("where with three arguments", lambda x: torch.where(x > 0, x, 0.0))
reads("read by a mask", lambda x: x[x > 0])
reads("write a number by a mask", masked_write)
reads("unique", lambda x: x.unique())
reads("repeat_interleave by a tensor", lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.long)))
reads("inverse", lambda x: torch.linalg.inv(torch.diag(x[:4])))

# Copies

captures("pageable memory to the device", lambda h: h.cuda(), host)
captures("pageable memory to the device, non_blocking", lambda h: h.to("cuda", non_blocking=True), host)
captures("device into pageable memory", lambda h, x: h.copy_(x[:8]), host, ones)
captures("device into pageable memory, non_blocking", lambda h, x: h.copy_(x[:8], non_blocking=True), host, ones)
captures("pinned memory to the device", lambda h: h.cuda(), pinned)
captures("a tensor of a list", lambda: torch.tensor([1.0, 2.0], device="cuda"))
captures("a tensor of one number", lambda: torch.tensor(3.0, device="cuda"))
captures("full with a number", lambda: torch.full((4,), 3.0, device="cuda"))
captures("index by a tensor of the host", lambda x, i: x[i], ones, lambda: torch.tensor([0, 2]))
captures("pin_memory", lambda h, x: (h.pin_memory(), x + 1), host, ones, warm=False)
reads("to the host, non_blocking", lambda x: x.to("cpu", non_blocking=True))
reads("a number in an operation", lambda x: x * 3.0)
reads("a number of the host as a tensor in an operation", lambda x: x * torch.tensor(3.0))
reads("index by a list", lambda x: x[[0, 2]])


@rule("pinned memory to the device, non_blocking")
def pinned_to_device() -> str:
    host, graph, kept = torch.ones(8).pin_memory(), torch.cuda.CUDAGraph(), []
    told = captured(lambda: kept.append(host.to("cuda", non_blocking=True)), warm=False, graph=graph)
    if told != "captured":
        return told
    host.fill_(7)
    graph.replay()
    return f"{told}; a replay reads the host's memory again, {numbers(kept[0])}"


@rule("device to pinned memory, non_blocking")
def device_to_pinned() -> str:
    x, host, graph = ones(8), torch.zeros(8).pin_memory(), torch.cuda.CUDAGraph()
    told = captured(lambda: host.copy_(x, non_blocking=True), warm=False, graph=graph)
    if told != "captured":
        return told
    before = numbers(host)
    graph.replay()
    torch.cuda.synchronize()
    return f"{told}; the host has {before}, and after a replay {numbers(host)}"


# Waits, events and streams


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    return event


captures("synchronize", torch.cuda.synchronize)
captures("synchronize the stream that captures", lambda: torch.cuda.current_stream().synchronize())
captures("query the stream that captures", lambda: torch.cuda.current_stream().query())
captures("synchronize another stream", lambda s, x: (s.synchronize(), x + 1), torch.cuda.Stream, ones)
captures("query another stream", lambda s, x: (s.query(), x + 1), torch.cuda.Stream, ones)
captures("make a stream", lambda x: (torch.cuda.Stream(), x + 1), ones)
for mode in MODES:
    how = {"capture_error_mode": mode}
    captures(f"query an event of before, {mode}", lambda e, x: (e.query(), x + 1), recorded_event, ones, **how)
    captures(f"wait for an event of before, {mode}", lambda e, x: (e.synchronize(), x + 1), recorded_event, ones, **how)


@rule("query an event recorded in the capture")
def query_inside() -> str:
    event, x = torch.cuda.Event(), ones()
    told = captured(lambda: (x + 1, event.record(), event.query()), warm=False)
    return f"{told}; afterwards {outcome(event.query)}"


@rule("a stream that waits after the capture for an event of the capture")
def wait_for_captured_event() -> str:
    event, x = torch.cuda.Event(), ones()
    told = captured(lambda: (x + 1, event.record()), warm=False)
    return f"{told}; the wait {outcome(lambda: torch.cuda.current_stream().wait_event(event))}"


def fork(side: torch.cuda.Stream, x: torch.Tensor, *, wait: bool = True, work: bool = True, join: bool = True) -> None:
    here = torch.cuda.current_stream()
    if wait:
        side.wait_stream(here)
    with torch.cuda.stream(side):
        if work:
            x.mul_(2)
    if join:
        here.wait_stream(side)
    x.add_(1)


def forks(name: str, *, stream: Callable[[], Any] = torch.cuda.Stream, **how: bool) -> None:
    captures(name, lambda s, x: fork(s, x, **how), stream, ones)


forks("a side stream that waits and is waited for")
forks("a side stream that is not waited for", join=False)
forks("a side stream that waits and does nothing", work=False, join=False)
forks("a side stream that does not wait and is waited for", wait=False)
forks("work on the default stream", stream=torch.cuda.default_stream, wait=False, join=False)
forks("the default stream waits for the capture", stream=torch.cuda.default_stream, work=False, join=False)
forks("the capture waits for the default stream", stream=torch.cuda.default_stream, wait=False, work=False)


@rule("work on a side stream that needs a new segment")
def side_allocates() -> str:
    side = torch.cuda.Stream()

    def body() -> None:
        with torch.cuda.stream(side):
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")

    return captured(body)


@rule("a replay orders its side stream")
def side_order() -> str:
    x, side, graph = ones(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fork(side, x)
    graph.replay()
    graph.replay()
    return f"1, times 2 plus 1, twice: {numbers(x)}"


@rule("capture_begin on the default stream")
def on_default() -> str:
    return outcome(torch.cuda.CUDAGraph().capture_begin)


@rule("capture_end on another stream")
def ends_elsewhere() -> str:
    graph, x = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        x.add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            elsewhere = outcome(graph.capture_end)
        return f"{elsewhere}; then on its own stream {outcome(graph.capture_end)}"


@rule("torch.cuda.graph inside of a capture")
def nested() -> str:
    def body() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            ones()

    return captured(body, warm=False)


@rule("two captures at a time in one thread")
def two_captures() -> str:
    one, two, x = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), ones()
    with torch.cuda.stream(torch.cuda.Stream()):
        one.capture_begin()
        x.add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            second = outcome(two.capture_begin)
            if second == "allowed":
                x.add_(1)
                second += f", its end {outcome(two.capture_end)}"
        return f"the second {second}; the end of the first {outcome(one.capture_end)}"


@rule("one capture waits for another")
def merge() -> str:
    streams, graphs = [torch.cuda.Stream(), torch.cuda.Stream()], [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    x = ones()
    for stream, graph in zip(streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_begin()
            x.add_(1)
    told = outcome(lambda: streams[0].wait_stream(streams[1]))
    with torch.cuda.stream(streams[0]):
        return f"{told}; the end {outcome(graphs[0].capture_end)}"


# Other threads, by mode


def beside(what: str, call: Callable[..., object], *makes: Callable[[], Any]) -> None:
    """Register, for each mode, what ``call`` does in another thread, and what it does to the capture."""
    for mode in MODES:
        rule(f"{what}, {mode}")(functools.partial(_beside, call, makes, mode))


def _beside(call: Callable[..., object], makes: tuple[Callable[[], Any], ...], mode: str) -> str:
    call(*[make() for make in makes])
    made, told, x = [make() for make in makes], [], ones()
    x.add_(1)

    def body() -> None:
        told.append(in_thread(lambda: call(*made)))
        x.add_(1)

    here = captured(body, warm=False, capture_error_mode=mode)
    return f"the thread {told[-1]}; the capture {here}"


def on_own_stream(stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
    with torch.cuda.stream(stream):
        work()


def segment() -> list[torch.Tensor]:
    return [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]


def small_graph(pool: Any = None, *, keep: bool = False) -> Any:
    graph, x = (torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()), ones()
    with torch.cuda.graph(graph, pool=pool):
        graph.output = x + 1
    graph.input = x  # a graph does not keep what it reads
    return graph


beside("allocate in another thread", lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
beside("free memory in another thread", lambda held: (held.clear(), torch.cuda.empty_cache()), segment)
beside("query an event in another thread", lambda event: event.query(), recorded_event)
beside("item in another thread", lambda x: x[0].item(), ones)
beside("synchronize in another thread", torch.cuda.synchronize)
beside("launch on the default stream of another thread", lambda x: x.mul_(1), ones)
beside(
    "launch on a stream of another thread", lambda s, x: on_own_stream(s, lambda: x.mul_(1)), torch.cuda.Stream, ones
)
beside("replay in another thread", lambda s, graph: on_own_stream(s, graph.replay), torch.cuda.Stream, small_graph)
beside("reset a graph in another thread", lambda graph: graph.reset(), small_graph)


@rule("memory that another thread allocates during a capture")
def thread_allocates() -> str:
    graph, made = torch.cuda.CUDAGraph(), []

    def body() -> None:
        in_thread(lambda: made.append(torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")))
        ones()

    told = captured(body, warm=False, graph=graph, capture_error_mode="thread_local")
    return f"{told}; it is of the graph's pool {pool_mib(graph.pool()) >= 64}"


def end_in_thread(mode: str) -> str:
    graph, x = torch.cuda.CUDAGraph(), ones()
    stream = torch.cuda.Stream()

    def end() -> None:
        with torch.cuda.stream(stream):
            graph.capture_end()

    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        x.add_(1)
        told = in_thread(end)
        if told != "allowed":
            told += f"; then in its own thread {outcome(graph.capture_end)}"
    return told


for mode in MODES:
    rule(f"end in another thread, {mode}")(functools.partial(end_in_thread, mode))

# Graphs


@rule("replay of another graph in a capture")
def child_graph() -> str:
    inner, outer = small_graph(), torch.cuda.CUDAGraph()
    told = captured(inner.replay, graph=outer)
    inner.output.zero_()
    return f"{told}; replay {outcome(outer.replay)}, the value is {numbers(inner.output)}"


@rule("replay of a graph with random numbers in a capture")
def child_with_generator() -> str:
    x, inner = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(inner):
        torch.rand_like(x)
    return captured(inner.replay)


@rule("calls in the wrong order")
def wrong_order() -> str:
    graph, later = torch.cuda.CUDAGraph(), small_graph()
    told = {
        "replay before a capture": outcome(graph.replay),
        "pool before a capture": outcome(graph.pool),
        "reset before a capture": outcome(graph.reset),
    }
    with torch.cuda.stream(torch.cuda.Stream()):
        told["begin again after a capture"] = outcome(later.capture_begin)
    later.reset()
    told["replay after reset"] = outcome(later.replay)
    told["reset again"] = outcome(later.reset)
    return "; ".join(f"{what} {answer}" for what, answer in told.items())


@rule("keep_graph")
def keep_graph() -> str:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    told = {"instantiate before a capture": outcome(graph.instantiate)}
    kept = small_graph(keep=True)
    told["raw_cuda_graph"] = outcome(kept.raw_cuda_graph)
    told["replay without instantiate"] = outcome(kept.replay)
    told["instantiate after a replay"] = outcome(kept.instantiate)
    told["raw_cuda_graph of a graph that is not kept"] = outcome(small_graph().raw_cuda_graph)
    return "; ".join(f"{what} {answer}" for what, answer in told.items())


@rule("replays on another stream")
def replay_elsewhere() -> str:
    graph, stream = small_graph(), torch.cuda.Stream()
    graph.output.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    return f"allowed, the value is {numbers(graph.output)}"


@rule("copies and replays on one stream are in order")
def in_order() -> str:
    x, graph, seen = ones(), torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y = x * 2
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        seen.append(y.clone())
    return numbers(*seen)


# Memory of graphs


@rule("a new segment in a capture")
def new_segment() -> str:
    return captured(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"), warm=False)


@rule("empty_cache in a capture, with memory to free")
def empty_inside() -> str:
    held = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
    before, x = torch.cuda.memory_reserved(), ones()

    def body() -> None:
        held.clear()
        torch.cuda.empty_cache()
        x.add_(1)

    told = captured(body, warm=False)
    return f"{told}; it freed them {torch.cuda.memory_reserved() < before}"


@rule("more memory than there is")
def out_of_memory() -> str:
    told = captured(lambda: torch.empty(1 << 48, dtype=torch.uint8, device="cuda"), warm=False)
    return f"{told}; another capture {captured(ones)}"


@rule("memory freed in a capture is used again in it")
def freed_inside() -> str:
    told: list[bool] = []

    def body() -> None:
        x = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        first = x.data_ptr()
        del x
        told.append(torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == first)

    return f"{captured(body, warm=False)}; {told[-1]}"


@rule("memory freed in a capture is used by eager work afterwards")
def freed_for_eager() -> str:
    graph, address = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        address.append(torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr())
    kept = [torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    return str(address[0] in [tensor.data_ptr() for tensor in kept])


@rule("memory with record_stream, freed in a capture, is used again in it")
def recorded_stream() -> str:
    told: list[bool] = []
    side = torch.cuda.Stream()

    def body() -> None:
        here = torch.cuda.current_stream()
        x = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        side.wait_stream(here)
        x.record_stream(side)
        first = x.data_ptr()
        del x
        here.wait_stream(side)
        told.append(torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == first)

    return f"{captured(body, warm=False)}; {told[-1]}"


@rule("eager memory freed in a capture is used by the capture")
def eager_freed_inside() -> str:
    held = [torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")]
    address, told = held[0].data_ptr(), []

    def body() -> None:
        held.clear()
        told.append(torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address)

    return f"{captured(body, warm=False)}; {told[-1]}"


@rule("three graphs of one pool, growth in MiB")
def pool_growth() -> str:
    handle, kept, growth = torch.cuda.graph_pool_handle(), [], []
    for _ in range(3):
        before = pool_mib(handle)
        kept.append(small_graph(handle))
        growth.append(pool_mib(handle) - before)
    return ", ".join(map(str, growth))


@rule("graphs of one pool on two streams, growth in MiB")
def pool_of_two_streams() -> str:
    handle, x, kept, growth = torch.cuda.graph_pool_handle(), ones(), [], []
    for _ in range(2):
        before, graph = pool_mib(handle), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle, stream=torch.cuda.Stream()):
            kept += [graph, x + 1]
        growth.append(pool_mib(handle) - before)
    return ", ".join(map(str, growth))


@rule("a second graph of a pool uses the memory of the first")
def shared_addresses() -> str:
    handle, x, told = torch.cuda.graph_pool_handle(), ones(), []
    one, two, three = (torch.cuda.CUDAGraph() for _ in range(3))
    with torch.cuda.graph(one, pool=handle):
        first = x + 1
    address = first.data_ptr()
    with torch.cuda.graph(two, pool=handle):
        second = x + 2
    told.append(second.data_ptr() == address)
    del first
    with torch.cuda.graph(three, pool=handle):
        third = x + 3
    told.append(third.data_ptr() == address)
    return f"while its output lives {told[0]}, afterwards {told[1]}"


@rule("a pool whose last graph is gone")
def pool_after_graphs() -> str:
    handle = torch.cuda.graph_pool_handle()
    graph = small_graph(handle)
    held = pool_mib(handle)
    graph.reset()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    left, again, x = pool_mib(handle), torch.cuda.CUDAGraph(), ones()
    used = captured(lambda: x + 1, graph=again, pool=handle)
    return f"held {held} MiB, holds {left} MiB; the handle again {used}"


@rule("an output that outlives its graph")
def output_outlives() -> str:
    graph = small_graph()
    graph.replay()
    handle, output = graph.pool(), graph.output
    graph.reset()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    held, value = pool_mib(handle), numbers(output)
    del output
    torch.cuda.empty_cache()
    return f"the value is {value}, its pool holds {held} MiB; without it {pool_mib(handle)} MiB"


@rule("a pool in use by another capture")
def pool_in_use() -> str:
    handle, x = torch.cuda.graph_pool_handle(), ones()
    one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        one.capture_begin(pool=handle)
        x.add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            second = outcome(lambda: two.capture_begin(pool=handle))
        return f"a second capture into it {second}; the end of the first {outcome(one.capture_end)}"


# What a refused capture leaves


def after_refusal(name: str, ask: Callable[[Any], str], **options: Any) -> None:
    rule(f"after a refused capture, {name}")(lambda: ask(refused_graph(**options)))


def eager_after(_: Any) -> str:
    return outcome(lambda: torch.cuda.synchronize() or numbers(ones() + 1))


def stream_after(_: Any) -> str:
    return (
        f"capturing {torch.cuda.is_current_stream_capturing()}, "
        f"the default stream is current {torch.cuda.current_stream() == torch.cuda.default_stream()}"
    )


def handle_again(_: Any) -> str:
    handle, x = torch.cuda.graph_pool_handle(), ones()
    refused_graph(pool=handle)
    return captured(lambda: x + 1, pool=handle)


def shared_handle_again(_: Any) -> str:
    handle, x = torch.cuda.graph_pool_handle(), ones()
    first, output = torch.cuda.CUDAGraph(), []
    told = captured(lambda: output.append(x + 1), graph=first, pool=handle, warm=False)
    refused_graph(pool=handle)
    again = captured(lambda: x + 1, pool=handle)
    return f"{told}; again {again}; the first replays {outcome(first.replay)}, {numbers(output[0])}"


def released(graph: Any) -> str:
    held = [private_mib()]
    told = outcome(graph.reset)
    held.append(private_mib())
    del graph
    gc.collect()
    emptied = outcome(torch.cuda.empty_cache)
    held.append(private_mib())
    return f"private MiB {held[0]}, reset {told} {held[1]}, empty_cache {emptied} {held[2]}"


def same_seed(_: Any) -> str:
    torch.manual_seed(1)
    first = torch.rand(8, device="cuda")
    torch.manual_seed(1)
    return f"the seed repeats {torch.equal(first, torch.rand(8, device='cuda'))}"


after_refusal("eager work", eager_after)
after_refusal("the current stream", stream_after)
after_refusal("empty_cache", lambda _: outcome(torch.cuda.empty_cache))
after_refusal("its pool", lambda graph: outcome(graph.pool))
after_refusal("its replay", lambda graph: outcome(graph.replay))
after_refusal("its memory", released)
after_refusal("another capture", lambda _: captured(plus_one))
after_refusal("its handle again", handle_again)
after_refusal("a handle with another graph", shared_handle_again)
after_refusal("the same graph again", lambda graph: captured(plus_one, graph=graph))
after_refusal("random numbers", lambda _: outcome(lambda: torch.rand(4, device="cuda")))
after_refusal("seeds", same_seed)
after_refusal("pinned memory", lambda _: outcome(lambda: torch.ones(8).pin_memory().cuda()))


@rule("after a refused capture that drew, random numbers")
def drawn_and_refused() -> str:
    x = ones()
    captured(lambda: (torch.rand_like(x), x.sum().item()), warm=False)
    eager = outcome(lambda: torch.rand(4, device="cuda"))
    return f"{eager}; after another capture {captured(lambda: x + 1)}, {outcome(lambda: torch.rand(4, device='cuda'))}"


# Random numbers


@rule("the default generator")
def default_generator() -> str:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand_like(x)
    torch.manual_seed(7)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(drawn.clone())
    torch.manual_seed(7)
    eager = [torch.rand_like(x), torch.rand_like(x)]
    torch.manual_seed(7)
    graph.replay()
    return (
        f"two replays differ {not torch.equal(*seen)}, a seed repeats the first {torch.equal(drawn, seen[0])}, "
        f"eager draws the same {torch.equal(eager[0], seen[0])} and {torch.equal(eager[1], seen[1])}"
    )


@rule("a replay moves the default generator on as eager does")
def generator_offset() -> str:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.rand_like(x)
    states = []
    for draw in (graph.replay, lambda: torch.rand_like(x)):
        torch.manual_seed(7)
        draw()
        states.append(torch.cuda.get_rng_state())
    return str(torch.equal(*states))


@rule("two graphs draw in turn")
def two_graphs_draw() -> str:
    x, graphs, drawn = ones(), [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            drawn.append(torch.rand_like(x))
    torch.manual_seed(3)
    for graph in graphs:
        graph.replay()
    torch.manual_seed(3)
    return ", ".join(str(torch.equal(each, torch.rand_like(x))) for each in drawn) + " equal to eager"


captures("manual_seed with another seed", lambda: torch.cuda.manual_seed(3), warm=False)
captures("manual_seed with the same seed", lambda: torch.cuda.manual_seed(3))
captures("get_rng_state", torch.cuda.get_rng_state)
captures("set_rng_state", torch.cuda.set_rng_state, lambda: torch.cuda.get_rng_state())
captures("get_rng_state after a draw", lambda: (torch.rand(4, device="cuda"), torch.cuda.get_rng_state()))
captures("initial_seed", torch.cuda.initial_seed)


def draw(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(16, device="cuda", generator=generator)


@rule("a generator that the graph does not know")
def unknown_generator() -> str:
    own = torch.Generator("cuda:0")
    told = captured(lambda: draw(own))
    return f"{told}; afterwards {outcome(lambda: draw(own))}"


@rule("a generator that the graph registers")
def registered_generator() -> str:
    own, graph, drawn = torch.Generator("cuda:0"), torch.cuda.CUDAGraph(), []
    graph.register_generator_state(own)
    told = captured(lambda: drawn.append(draw(own)), graph=graph)
    if told != "captured":
        return told
    own.manual_seed(5)
    graph.replay()
    return f"{told}; equal to eager {torch.equal(drawn[-1], draw(torch.Generator('cuda:0').manual_seed(5)))}"


@rule("a generator without index that the graph registers")
def registered_without_index() -> str:
    own, graph = torch.Generator("cuda"), torch.cuda.CUDAGraph()
    return f"{outcome(lambda: graph.register_generator_state(own))}; {captured(lambda: draw(own), graph=graph)}"


@rule("a generator of a graph whose capture was refused")
def generator_of_refused() -> str:
    own, graph = torch.Generator("cuda:0").manual_seed(5), torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    captured(lambda: draw(own).sum().item(), warm=False, graph=graph)
    first = outcome(lambda: draw(own))
    return f"it draws {first}; another capture {captured(ones)}, it draws {outcome(lambda: draw(own))}"


@rule("a generator that is registered in the capture")
def registered_inside() -> str:
    own, graph = torch.Generator("cuda:0"), torch.cuda.CUDAGraph()
    return captured(lambda: (graph.register_generator_state(own), draw(own)), warm=False, graph=graph)


@rule("the device of a generator")
def generator_device() -> str:
    return f"of 'cuda' {torch.Generator('cuda').device}, of 'cuda:0' {torch.Generator('cuda:0').device}"


@rule("a capture that draws, begun in inference mode and replayed outside")
def inference_begin() -> str:
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.inference_mode():
        told = captured(lambda: torch.rand_like(x), warm=False, graph=graph)
    return f"{told}; replay {outcome(graph.replay)}"


# Running them


def describe() -> str:
    """The machine. A rule like the others, since it needs the device."""
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, on {torch.cuda.get_device_name()}"


def answers(asks: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Ask each in a forked process, some at a time. No process may have used CUDA before the fork."""
    waiting, running, found = list(asks), {}, {}
    torch.ones(1, device="meta").add(1)  # imports torch's shape functions here, not in each child
    gc.freeze()  # a collection in a child would touch, and thereby copy, the memory of all modules
    at_once = min(RUNNING_AT_ONCE, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                path = Path(folder) / str(len(waiting))
                running[_forked(asks[name], path)] = name, path, time.monotonic() + RULE_LIMIT_S
            for pid in _ended(running):
                name, path, _ = running.pop(pid)
                found[name] = path.read_text(encoding="utf-8") if path.exists() else "the process died"
            time.sleep(0.005)
    return {name: found[name] for name in asks}


def _forked(ask: Callable[[], str], path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _silence()
        warnings.simplefilter("ignore")
        try:
            answer = ask()
        except Exception as error:
            answer = f"could not be asked, {error_text(error)}"
        path.write_text(answer, encoding="utf-8")
    finally:
        os._exit(0)


def _silence() -> None:
    # Torch's C++ writes warnings to the file descriptor.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _ended(running: Mapping[int, tuple[str, Path, float]]) -> list[int]:
    ended = []
    for pid, (_, path, ends_s) in running.items():
        if os.waitpid(pid, os.WNOHANG)[0]:
            ended.append(pid)
        elif time.monotonic() > ends_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            path.write_text(f"no answer within {RULE_LIMIT_S:g} s", encoding="utf-8")
            ended.append(pid)
    return ended


def document() -> str:
    """The lines of all rules, after a line on the machine. Raises SystemExit where there is no CUDA device."""
    described = answers({"": describe})[""]
    if not described.startswith("torch "):
        raise SystemExit(f"there is no CUDA device to ask: {described}")
    return f"# {described}\n" + "".join(f"{name}: {answer}\n" for name, answer in answers(RULES).items())


def machine(text: str) -> str:
    """What answered."""
    return text.partition("\n")[0].removeprefix("# ")


def parse(text: str) -> dict[str, str]:
    """The answers by rule."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: answer for name, _, answer in (line.partition(": ") for line in lines)}


def differences(expected: str, found: str) -> list[dict[str, str | None]]:
    """The rules with another answer, or none, in one of two documents."""
    one, two = parse(expected), parse(found)
    names = [*one, *(name for name in two if name not in one)]
    return [
        {"rule": name, "expected": one.get(name), "found": two.get(name)}
        for name in names
        if one.get(name) != two.get(name)
    ]


def difference_text(difference: Mapping[str, str | None]) -> str:
    """Three lines, with the doubt where there was one."""
    name = str(difference["rule"])
    doubt = f" (doubtful: {DOUBTFUL[name]})" if name in DOUBTFUL else ""
    return f"{name}{doubt}\n  expected: {difference['expected']}\n  found:    {difference['found']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="answers to compare with")
    arguments = parser.parse_args()
    found = document()
    if arguments.compare is None:
        print(found, end="")
        return 0
    differing = differences(arguments.compare.read_text(encoding="utf-8"), found)
    for each in differing:
        print(difference_text(each))
    print(f"{len(differing)} of {len(RULES)} rules differ from {arguments.compare}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

"""A process of its own: captures are refused, and everything must work as if nothing had been.

``python after_a_refusal.py KIND...`` runs the kinds named, one after the other in this one process. A broken recovery
would spoil every later test of the process it happens in, which is why these run apart from the suite.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from tests.gpu.sizes import large

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import CaptureRefusal


def reads_a_scalar(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def reads_a_scalar_after_drawing(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.rand_like(x)) * x.sum().item()


def copies_from_the_host(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def has_a_dynamic_shape(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum() + x


def raises_in_python(x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("only while capturing")
    return x + 1


def swallows_the_refusal(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.sum().item()
    except RuntimeError:
        return x + 1


_STREAMS: list[torch.cuda.Stream] = []


def other_stream() -> torch.cuda.Stream:
    """One stream for the whole process, made in the warm-up: making one is not what a capture is to refuse."""
    if not _STREAMS:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[0]


def leaves_a_stream_unjoined(x: torch.Tensor) -> torch.Tensor:
    other = other_stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x * 2
    return x + 1


def joins_its_stream(x: torch.Tensor) -> torch.Tensor:
    other, here = other_stream(), torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        y = x * 2
    here.wait_stream(other)
    return x + y


def waits_for_work_outside(x: torch.Tensor) -> torch.Tensor:
    other = other_stream()
    with torch.cuda.stream(other):
        y = x * 2
    torch.cuda.current_stream().wait_stream(other)
    return x + y


def takes_new_memory_outside(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(other_stream()):  # more than the allocator has kept: CUDA refuses it as it does a wait
        x.new_zeros(1 << 23)
    return x + 1


class DrawsOfItsOwn:
    """Draws from a generator of its own before it is refused: that one must leave the capture mode too."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cuda").manual_seed(5)
        self.__name__ = "DrawsOfItsOwn"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(x.shape, generator=self.generator, device=x.device)
        return (x + drawn) * x.sum().item()


KINDS = {
    "item": (reads_a_scalar, "host-sync"),
    "item-after-drawing": (reads_a_scalar_after_drawing, "host-sync"),
    "host-copy": (copies_from_the_host, "host-data"),
    "dynamic-shape": (has_a_dynamic_shape, "dynamic-shape"),
    "python-error": (raises_in_python, "unknown-op"),
    "swallowed": (swallows_the_refusal, "host-sync"),
    "unjoined": (leaves_a_stream_unjoined, "unknown-op"),
    "outside": (waits_for_work_outside, "unknown-op"),
    "new-memory-outside": (takes_new_memory_outside, "unknown-op"),
    "own-generator": (DrawsOfItsOwn, "host-sync"),
}


def main(kinds: list[str]) -> None:
    backend = open_backend("cuda")
    x = torch.ones(4, device=backend.device)
    with backend.pool() as pool:
        earlier = pool.capture(lambda x: x * 3, (x,), {}, batch_size=4)
        for kind in kinds:
            model, hazard = KINDS[kind]
            model = model() if isinstance(model, type) else model
            refuse(pool, model, hazard, x)
            if isinstance(model, DrawsOfItsOwn):
                use_generator(model.generator, x, kind)
            assert earlier(x + 1).eq(6).all(), f"{kind}: a graph captured earlier replays something else"
            use_the_gpu(kind)
            later = pool.capture(lambda x: x * 5, (x,), {}, batch_size=4)
            assert later(x + 1).eq(10).all(), f"{kind}: the next capture replays something else"
            draw_in_a_graph(pool, x, kind)
        forked = pool.capture(joins_its_stream, (x,), {}, batch_size=4)
        assert forked(x + 1).eq(6).all(), "a fork that joins is captured wrongly"
    hold_no_pool(kinds)
    give_memory_back(backend)
    print("fine after:", *kinds)


def refuse(pool, model, hazard, x):
    with pytest.raises(CaptureRefusal) as raised:
        pool.capture(model, (x,), {}, batch_size=4)
    refusal = raised.value
    print(f"{model.__name__}: {refusal}")
    assert refusal.hazard == hazard, f"{model.__name__}: hazard {refusal.hazard}, expected {hazard}"
    assert refusal.site is not None, f"{model.__name__}: no line of the model is named"
    assert refusal.site.file == __file__, f"{model.__name__}: {refusal.site} is no line of the model"


def use_the_gpu(kind):
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    first = torch.rand(1000, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1000, device="cuda"), first), f"{kind}: the seed no longer decides"
    assert not torch.equal(torch.rand(1000, device="cuda"), first), f"{kind}: random numbers stand still"
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert product.sum().item() == 64**3, f"{kind}: plain CUDA work went wrong"
    assert not torch.cuda.is_current_stream_capturing(), f"{kind}: the caller's stream still captures"


def use_generator(generator, x, kind):
    """The generator stands where it stood, and draws in eager and in graphs as if nothing had been."""
    expected = torch.rand(x.shape, generator=torch.Generator("cuda").manual_seed(5), device="cuda")
    assert torch.equal(torch.rand(x.shape, generator=generator, device="cuda"), expected), f"{kind}: it has moved"


def hold_no_pool(kinds):
    """Captures that were refused into the pool of an open graph keep no share of it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    assert not held, f"after {', '.join(kinds)}: {len(held)} segments of closed graphs are still held"


def give_memory_back(backend):
    """Refused captures of much memory, with no other graph in their pool, must not add up."""

    def takes_much_memory(x):
        y = torch.zeros(large(64 << 20), device=x.device)
        return y * x.sum().item()

    held = []
    for _ in range(3):
        with backend.pool() as pool, pytest.raises(CaptureRefusal):
            pool.capture(takes_much_memory, (torch.ones(4, device=backend.device),), {}, batch_size=4)
        gc.collect()  # what a traceback held
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    print("reserved after each of three refused captures:", held)
    assert held[-1] <= held[0], f"refused captures keep memory: {held}"


def draw_in_a_graph(pool, x, kind):
    graph = pool.capture(torch.rand_like, (x,), {}, batch_size=4)
    torch.manual_seed(2)
    first, second = graph(x).clone(), graph(x).clone()
    assert not torch.equal(first, second), f"{kind}: replays draw the same numbers"
    torch.manual_seed(2)
    assert torch.equal(torch.rand_like(x), first), f"{kind}: a replay draws other numbers than eager"


if __name__ == "__main__":
    main(sys.argv[1:])

"""Random sequences of captures, replays, refusals, evictions, new weights and closes, each call compared with eager.

    python -m tests.gpu.sequences 0 10000       the sequences of these seeds, on this machine's CUDA device
    python -m tests.gpu.sequences 42 43         one sequence again, with its steps

Needs this source tree and a CUDA device: a GPU, or the emulated device (``emulator/``). A sequence uses runners and
pools on small models, legally and not. Each output that is served is compared with an eager copy of the model at once,
and so is the model's state. At the end of a sequence the allocator must hold nothing of it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytest_cudagraph import GraphRunner, pytree
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.errors import CaptureRefusal, CudagraphError, InputError

FEATURES = 6
SIZES = (1, 2, 3, 5, 8)
MOST_SUBJECTS = 3


# Models. Two of one kind and seed are equal.


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))
        self.bias = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"sums": (x * self.weight).sum(1), "rows": [x + 1, x.abs()], "weights": self.weight * 2}


class Normalised(nn.Module):
    """Its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) * self.weight


class Averages(nn.Module):
    """Writes to its buffers at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        self.mean.lerp_(x.mean(0), 0.25)
        return x + self.mean * self.steps


class RowCache(nn.Module):
    """Writes to one row of its cache per row of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SIZES[-1] + 4, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cache[: x.shape[0]].mul_(0.5).add_(x) * 2


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class DrawsOfItsOwn(nn.Module):
    """Draws from a generator of its own, made without the index of its device."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(int(torch.randint(1000, ())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator, device=x.device)


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES))
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            doubled = x * 2
        there = x * self.weight
        here.wait_stream(self.side)
        doubled.record_stream(here)
        return there + doubled


STATELESS = (Affine, TwoLayers, SeveralOutputs, Normalised, Forks)
KINDS = (*STATELESS, Affine, TwoLayers, Averages, RowCache, Draws, DrawsOfItsOwn)


def reads(x: torch.Tensor) -> None:
    x.sum().item()


def has_a_dynamic_shape(x: torch.Tensor) -> None:
    x[x > 0].sum()


def copies_from_the_host(x: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0], device=x.device)


def raises(x: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("only in a capture")


def swallows(x: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        x.sum().item()


def leaves_a_stream(x: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 2


def wants_too_much(x: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 48, dtype=torch.uint8, device=x.device)


def writes_its_input(x: torch.Tensor) -> None:
    x.mul_(1.0).add_(1.0).sub_(1.0)


def draws_and_reads(x: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.rand_like(x).sum().item()


REFUSED = (
    reads, has_a_dynamic_shape, copies_from_the_host, raises, swallows, leaves_a_stream, wants_too_much,
    writes_its_input, draws_and_reads,
)  # fmt: skip


class Refusable(nn.Module):
    """A model, and a call before it that a capture refuses. The results are the same with and without that call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.before: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.before is not None:
            self.before(x)
        return self.inner(x)


# Subjects of a sequence


class Subject:
    """A model, an equal one that runs eager, and what serves the first."""

    def __init__(self, random_: random.Random, kinds: tuple[type[nn.Module], ...], tally: Counter[str]) -> None:
        self.random, self.tally = random_, tally
        self.kind = random_.choice(kinds)
        seed = random_.randrange(1000)
        self.model, self.reference = self._make(seed), self._make(seed)
        self.is_open = True

    def _make(self, seed: int) -> Refusable:
        torch.manual_seed(seed)
        return Refusable(self.kind()).cuda().eval()

    def rows(self, count: int) -> torch.Tensor:
        return torch.tensor([[self.random.gauss(0, 1) for _ in range(FEATURES)] for _ in range(count)], device="cuda")

    def both(self, serve: Callable[[torch.Tensor], Any], count: int, is_deep: bool = False) -> None:
        """Serve one call, and the same by the reference from equal inputs, random numbers and state."""
        x, seed = self.rows(count), self.random.randrange(1000)
        x = x[None] if is_deep else x
        given = x.clone()
        if self.kind is Draws:
            torch.manual_seed(seed)
        output = serve(given)
        if self.kind is Draws:
            torch.manual_seed(seed)
        with torch.inference_mode(torch.is_inference_mode_enabled() or self.random.random() < 0.5):
            expected = self.reference(x)
        self.compare(output, expected)
        self.tally["calls compared"] += 1

    def compare(self, output: Any, expected: Any) -> None:
        torch.testing.assert_close(output, expected)
        for (name, one), other in zip(
            self.model.state_dict().items(), self.reference.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"state {name}: {text}")

    def change_in_place(self) -> None:
        for one, other in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            new = torch.randn_like(other)
            with torch.no_grad():
                one.copy_(new)
                other.copy_(new)

    def replace(self) -> str:
        """Give the weights new memory in one of the ways that exist, and let the old be used by NaN."""
        how = self.random.choice(("data", "parameter", "assign", "module"))
        new = {
            name: torch.randn_like(held)
            for name, held in self.reference.state_dict().items()
            if held.is_floating_point()
        }
        for module in (self.model, self.reference):
            copies = {name: held.clone() for name, held in new.items()}
            if how == "assign":
                module.load_state_dict({**module.state_dict(), **copies}, assign=True)
                continue
            for name, held in copies.items():
                owner_name, _, own = name.rpartition(".")
                owner = module.get_submodule(owner_name)
                if how == "data" or own in owner._buffers:
                    getattr(owner, own).data = held
                else:
                    setattr(owner, own, nn.Parameter(held))
        if how == "module":
            for module in (self.model, self.reference):
                outer = Refusable(module.inner)
                outer.before = module.before
                module.inner = outer.inner
        churn(self.random)
        return how

    def refuse(self) -> str:
        self.model.before = self.random.choice((*REFUSED, None))
        return getattr(self.model.before, "__name__", "nothing")


class Runner(Subject):
    """A model behind a :class:`GraphRunner`."""

    def __init__(self, random_: random.Random, tally: Counter[str]) -> None:
        super().__init__(random_, KINDS, tally)
        if random_.random() < 0.2:
            self.refuse()
        self.clones = random_.random() < 0.8
        self.is_watched = random_.random() < 0.8
        self.run = GraphRunner(
            self.model,
            self.rows(2),
            batch_sizes=random_.sample(SIZES, random_.randint(1, 3)),
            max_graphs=random_.choice((None, None, 1, 2)),
            capture=random_.choice(("now", "lazy", "lazy")),
            clone_outputs=self.clones,
            watch="call" if self.is_watched else "manual",
        )
        self.steps = [self.call] * 5 + [
            self.call_twice, self.call_in_modes, self.change, self.renew, self.renew, self.refuse, self.recapture,
            self.also, self.wrong_call, self.call_in_threads, self.call_on_a_stream, self.inside_a_capture, self.train,
        ]  # fmt: skip

    def _some(self) -> int:
        return self.random.randint(1, self.run.batch_sizes[-1] + 1)

    def call(self) -> str:
        count = self._some()
        self.both(self.run, count)
        return f"{count} rows"

    def _before_and_after(self, change: Callable[[], Any]) -> Any:
        """Two calls of equal size, so that a graph of before could serve the second."""
        count = self._some()
        self.both(self.run, count)
        told = change()
        if not self.is_watched:
            self.run.renew_if_changed()
        self.both(self.run, count)
        return told

    def call_twice(self) -> None:
        first = self.run(self.rows(self._some())) if self.kind in STATELESS else None
        kept = pytree.map_tensors(torch.clone, first)
        self.call()
        if self.clones:
            torch.testing.assert_close(first, kept, rtol=0, atol=0, equal_nan=True)

    def call_in_modes(self) -> str:
        mode = self.random.choice((torch.no_grad, torch.inference_mode, torch.enable_grad))
        with mode():
            self.both(self.run, self._some())
        return mode.__name__

    def change(self) -> None:
        self._before_and_after(self.change_in_place)

    def renew(self) -> str:
        return self._before_and_after(self.replace)

    def train(self) -> None:
        training = self.random.random() < 0.5
        self._before_and_after(lambda: [model.train(training) for model in (self.model, self.reference)])

    def recapture(self) -> None:
        self._before_and_after(self.run.recapture)

    def also(self) -> None:
        """Calls of another form, in turn with those of the first."""
        if self.kind not in STATELESS:
            return
        if len(self.run.statistics.forms) == 1:
            self.run.also(self.rows(2)[None], batch_sizes=self.random.sample(SIZES, 2), batch_dim=1)
        for is_deep in (True, False, True):
            self.both(self.run, self._some(), is_deep)

    def wrong_call(self) -> None:
        """Calls that no graph fits run eager, also if the model raises."""
        wrong = self.random.choice(("dtype", "rank", "features", "none"))
        x = self.rows(2)
        given = {"dtype": x.double(), "rank": x[None, None], "features": x[:, :2], "none": x[:0]}[wrong]
        if self.kind not in STATELESS:
            return
        told = []
        for serve in (self.run, self.reference):
            try:
                told.append(serve(given.clone()))
            except (RuntimeError, IndexError, ValueError) as error:
                told.append(type(error).__name__)
        torch.testing.assert_close(*told, equal_nan=True) if not isinstance(told[0], str) else None
        assert isinstance(told[0], str) == isinstance(told[1], str), told

    def call_in_threads(self) -> None:
        if self.kind not in STATELESS or not self.clones:
            return
        failed: list[BaseException] = []
        inputs = [[self.rows(self._some()) for _ in range(2)] for _ in range(2)]
        torch.cuda.synchronize()

        def serve(own: list[torch.Tensor]) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for x in own:
                        output = self.run(x.clone())
                        torch.testing.assert_close(output, self.reference(x))
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=serve, args=(own,)) for own in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tally["calls compared"] += 4
        if failed:
            raise failed[0]

    def call_on_a_stream(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.both(self.run, self._some())
        torch.cuda.current_stream().wait_stream(stream)

    def inside_a_capture(self) -> None:
        """A graph that holds a call of the runner."""
        if self.kind not in (Affine, TwoLayers, Normalised) or self.model.before is not None:
            return
        count = self._some()
        with open_backend("cuda").pool() as pool:
            graph = pool.capture(self.run, (self.rows(count),), {}, batch_size=count)
            self.both(graph, count)
        self.tally["captures"] += 1

    def close(self) -> None:
        self.run.close()
        self.is_open = False
        with contextlib.suppress(CudagraphError):
            self.run(self.rows(1))
            raise AssertionError("a closed runner served a call")
        told = self.run.statistics
        self.tally["captures"] += told.captures
        self.tally["refused"] += told.eager.get("capture refused", 0) > 0
        self.tally["evictions"] += told.evictions
        self.tally["replays"] += sum(told.replays.values())


class Pool(Subject):
    """Graphs of a pool, used without a runner."""

    def __init__(self, random_: random.Random, tally: Counter[str]) -> None:
        super().__init__(random_, STATELESS, tally)
        self.pool = open_backend("cuda").pool()
        self.graphs: list[Any] = []
        self.steps = [self.capture] * 2 + [self.replay] * 3 + [
            self.poison, self.change, self.refuse, self.close_one, self.wrong_call,
        ]  # fmt: skip

    def capture(self) -> str:
        count = self.random.choice(SIZES)
        before, self.model.before = self.model.before, None if len(self.graphs) >= 4 else self.model.before
        try:
            graph = self.pool.capture(self.model, (self.rows(count),), {}, batch_size=count)
        except (CaptureRefusal, torch.OutOfMemoryError) as error:
            if self.model.before is None:
                raise AssertionError("a legal capture was refused") from error
            self.tally["refused"] += 1
            self.replay()
            return f"{self.model.before.__name__} is refused"
        finally:
            self.model.before = before
        self.graphs.append((graph, count))
        self.tally["captures"] += 1
        self.both(graph, count)
        return f"{count} rows"

    def replay(self) -> None:
        if self.graphs:
            graph, count = self.random.choice(self.graphs)
            self.both(graph, count)
            self.tally["replays"] += 1

    def poison(self) -> None:
        if self.graphs:
            self.random.choice(self.graphs)[0].poison()
            self.replay()

    def change(self) -> None:
        self.change_in_place()
        self.replay()

    def close_one(self) -> None:
        if self.graphs:
            graph, count = self.graphs.pop(self.random.randrange(len(self.graphs)))
            graph.close()
            churn(self.random)
            with contextlib.suppress(CudagraphError):
                graph(self.rows(count))
                raise AssertionError("a closed graph served a call")
            self.replay()

    def wrong_call(self) -> None:
        if self.graphs:
            graph, count = self.random.choice(self.graphs)
            with contextlib.suppress(InputError):
                graph(self.rows(count + 1))
                raise AssertionError("a graph took another shape")
            self.replay()

    def close(self) -> None:
        self.pool.close()
        self.is_open = False
        with contextlib.suppress(CudagraphError):
            self.pool.capture(self.model, (self.rows(1),), {}, batch_size=1)
            raise AssertionError("a closed pool captured")


def churn(random_: random.Random) -> None:
    """Fill memory that was freed with NaN, and sometimes give it back to the device."""
    held = [torch.full((random_.choice((1, FEATURES, 64, 1 << 12)),), float("nan"), device="cuda") for _ in range(12)]
    del held
    if random_.random() < 0.3:
        gc.collect(0)
        torch.cuda.empty_cache()


# Sequences


class Failure(Exception):
    """A sequence that went wrong, with its steps."""


def run_sequence(seed: int, tally: Counter[str]) -> None:
    """Run the sequence of one seed. Raises :class:`Failure`."""
    before = held()
    steps: list[str] = []
    try:
        _take_steps(random.Random(seed), steps, tally)
        if held() != before:
            gc.collect()
            assert held() == before, f"bytes and segments of graphs before {before}, afterwards {held()}"
    except Exception as error:
        text = "".join(traceback.format_exception(error, limit=-6))
        raise Failure(f"seed {seed}, after {'; '.join(steps)}\n{text}") from None
    finally:
        tally["sequences"] += 1
        tally["steps"] += len(steps)


def _take_steps(random_: random.Random, steps: list[str], tally: Counter[str]) -> None:
    subjects: list[Subject] = []
    for _ in range(random_.randint(3, 9)):
        if not subjects or (len(subjects) < MOST_SUBJECTS and random_.random() < 0.15):
            kind = random_.choice((Runner, Runner, Pool))
            steps.append(f"new {kind.__name__}")
            subjects.append(kind(random_, tally))
            steps[-1] += f" of {subjects[-1].kind.__name__}"
        at = random_.randrange(len(subjects))
        subject = subjects[at]
        step = random_.choice(subject.steps)
        steps.append(f"{at} {step.__name__}")
        told = step()
        steps[-1] += f" ({told})" if told else ""
        if random_.random() < 0.1:
            steps.append(f"close {at}")
            subjects.pop(at).close()
    random_.shuffle(subjects)
    for subject in subjects:
        steps.append(f"close {subject.kind.__name__}")
        subject.close()


def held() -> tuple[int, int]:
    """The bytes of all tensors, and the segments of pools of graphs, without what libraries keep."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return torch.cuda.memory_allocated(), sum(tuple(each["segment_pool_id"]) != (0, 0) for each in segments)


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Hide what lives now from the collector. Each capture collects, and torch's modules are a million objects."""
    torch.ones(1, device="meta").add(1)  # imports the shape functions, which the emulated device uses
    gc.collect()
    gc.freeze()
    counted, gc.get_freeze_count = gc.get_freeze_count, lambda: 1  # the count takes longer than a capture
    try:
        yield
    finally:
        gc.get_freeze_count = counted
        gc.unfreeze()


def main(first: int, end: int) -> int:
    warnings.simplefilter("ignore")
    with quick_collections():
        return _run_all(first, end)


def _run_all(first: int, end: int) -> int:
    tally: Counter[str] = Counter()
    failed, began_s = [], time.perf_counter()
    for seed in range(first, end):
        try:
            run_sequence(seed, tally)
        except Failure as failure:
            failed.append(seed)
            print(failure, flush=True)
        if seed in failed:
            gc.collect()  # the frames of the error hold tensors
        if (seed + 1) % 250 == 0:
            print(
                f"{seed + 1 - first} sequences, {len(failed)} failed, {time.perf_counter() - began_s:.0f} s", flush=True
            )
    spent_s = time.perf_counter() - began_s
    counts = ", ".join(f"{count} {what}" for what, count in tally.items())
    print(f"seeds {first} to {end - 1}: {counts} in {spent_s:.0f} s; {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))

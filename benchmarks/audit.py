"""What the audit of a model costs, held against one eager call of it, on the CPU twin with one thread.

The judged model runs 200 operations that are no views, in a few milliseconds; limit 25 eager calls and 50 ms. The audit
is the one a test gets: at one batch size and, by the rules, at another. Each round times one eager call and one audit,
in random order; the figures are medians over the rounds. Small models, whose calls are all overhead, are shown beside
it. Exits 1 when the limit is broken.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytest_cudagraph.audit import audit
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.inputs import Example, batch_examples

LIMIT_CALLS = 25
LIMIT_MS = 50.0
LAYERS = 40
ROWS = 16
WIDTH = 128


class Block(nn.Module):
    """Five operations: a norm, two linear layers with an activation between them, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def two_hundred_operations() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(*(Block() for _ in range(LAYERS))), (torch.randn(ROWS, WIDTH),), {}


def cnn() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    channels = (3, 16, 32, 32)
    layers = [
        part
        for before, after in itertools.pairwise(channels)
        for part in (nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*layers, nn.Flatten()), (torch.randn(2, 3, 32, 32),), {}


def tiny_llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **sizes)
    mask = (torch.arange(8) < torch.tensor([[8], [6]])).long()
    keywords = {"input_ids": torch.randint(2, 50, (2, 8)), "attention_mask": mask}
    return transformers.LlamaForCausalLM(config), (), keywords


def models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]]]:
    """Each by name; the first is judged."""
    yield "200 operations", two_hundred_operations
    yield "CNN of 13 layers", cnn
    if importlib.util.find_spec("transformers") is not None:
        yield "tiny Llama", tiny_llama


def measured(model: nn.Module, examples: list[Example], rounds: int) -> tuple[float, float, float]:
    """Milliseconds of one eager call, of one audit, and of the first audit in this process."""
    backend = open_backend("cpu")
    one, another = examples

    def eager() -> None:
        with backend.running():
            model(*one.args, **one.kwargs)

    def audited() -> None:
        audit(model, one, backend, another)

    _spent_ms(eager)
    first_ms = _spent_ms(audited)
    order = random.Random(0)
    spent: dict[Callable[[], None], list[float]] = {eager: [], audited: []}
    for _ in range(rounds):
        for call in order.sample(list(spent), 2):
            spent[call].append(_spent_ms(call))
    return statistics.median(spent[eager]), statistics.median(spent[audited]), first_ms


def _spent_ms(call: Callable[[], None]) -> float:
    gc.collect()  # what one arm leaves behind is not collected at the other's cost
    begin_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin_ns) / 1e6


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=25)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    is_broken = False
    for name, make in models():
        model, args, kwargs = make()
        size = next(iter((*args, *kwargs.values()))).shape[0]
        examples = batch_examples(Example(args=args, kwargs=kwargs), [size, 2 * size])
        eager_ms, audit_ms, first_ms = measured(model.eval(), [examples[size], examples[2 * size]], rounds)
        allowed_ms = LIMIT_CALLS * eager_ms + LIMIT_MS
        is_judged = make is two_hundred_operations
        is_broken |= is_judged and audit_ms > allowed_ms
        print(
            f"{name}: eager {eager_ms:.2f} ms, audit {audit_ms:.1f} ms (first {first_ms:.1f} ms), "
            f"{audit_ms / eager_ms:.1f} eager calls"
            f"{f'; limit {allowed_ms:.1f} ms' if is_judged else ''}"
        )
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())

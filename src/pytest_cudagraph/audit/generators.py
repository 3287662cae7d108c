"""The generators of random numbers that a process has: which of them a call moved, and putting them back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_cudagraph import leaves
from pytest_cudagraph.protocols import Backend

TORCHS = "torch's default generator"


class Generators:
    """torch's default generators, Python's ``random`` and, where it is loaded, ``numpy.random``, as they were."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._torch = backend.rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def moved(self) -> tuple[str, ...]:
        """Those that stand elsewhere now, by name."""
        moved = {
            TORCHS: not is_same(self._torch, self._backend.rng_state()),
            "Python's random": random.getstate() != self._python,
            "numpy.random": self._numpy is not None and not _is_same_numpy(self._numpy, _numpy_state()),
        }
        return tuple(name for name, has_moved in moved.items() if has_moved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back at the end, whatever happens."""
        with ExitStack() as stack:
            stack.callback(self._backend.set_rng_state, self._torch)
            stack.callback(random.setstate, self._python)
            if self._numpy is not None:
                stack.callback(sys.modules["numpy"].random.set_state, self._numpy)
            yield


def is_same(first: Any, second: Any) -> bool:
    """Whether two states of torch's generators (tensors in any nesting) are equal."""
    pairs = zip(leaves.flatten(first)[0], leaves.flatten(second)[0], strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _is_same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and bool((first[1] == second[1]).all())

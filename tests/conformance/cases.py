"""One case: a module of a few lines, the rows of the catalogue it stands for, and what each stage must say of it.

The line that a finding or a refusal must point at ends with ``# HERE``; where there is none, none may be named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

MARK = "# HERE"
WRONG = "wrong"
"""What the check says where it sees a difference and names no hazard for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What each stage of the twin must say: the id of a hazard, or nothing. After a refusal nothing is checked."""

    audit: str | None = None
    warnings: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    capture: str | None = None
    check: str | None = None

    @property
    def told(self) -> frozenset[str]:
        """The hazards that are told and fail nothing."""
        return self.warnings | self.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One module and its inputs, and what it stands for."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple, dict]]
    expected: Expected
    rows: tuple[int, ...] = ()
    source: object = None
    after_capture: Callable[[nn.Module], None] = field(default=lambda model: None)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    slow: bool = False
    batch_dim: Any = 0

    @property
    def is_hazard(self) -> bool:
        return bool(self.rows)

    @property
    def has_mark(self) -> bool:
        return MARK in inspect.getsource(self.source)


CASES: dict[str, Case] = {}


def hazard(*rows, audit=None, warnings=(), notes=(), capture=None, check=None, **facts):
    """Register a module that a capture refuses, or that a replay gets wrong; ``rows`` are those of the catalogue.

    ``facts`` are those of a :class:`Case`; ``exists`` is False where this torch lacks what the hazard needs.
    """
    told = {"warnings": frozenset(warnings), "notes": frozenset(notes)}
    expected = Expected(audit=audit, **told, capture=capture, check=check)
    assert rows
    return _registering(expected, rows=rows, **facts)


def note(*rows, ids, around=nullcontext):
    """Register a module that is captured and replayed rightly, and about which the audit has something to tell."""
    return _registering(Expected(notes=frozenset(ids)), rows=rows, around=around)


def clean(*, notes=(), around=nullcontext):
    """Register a module that looks like a hazard and is none: it passes every stage."""
    return _registering(Expected(notes=frozenset(notes)), around=around)


def _registering(expected, *, exists=True, **facts):
    def register(source):
        if not exists:
            return source
        name = source.__name__
        assert name not in CASES, f"two cases are called {name}"
        build = from_class(source) if isinstance(source, type) else source
        after = getattr(source, "after_capture", lambda model: None)
        CASES[name] = Case(
            name=name, build=build, expected=expected, source=source, after_capture=after, **{"rows": (), **facts}
        )
        return source

    return register


def from_class(cls):
    def build():
        args = cls.inputs()
        return cls().eval(), args if isinstance(args, tuple) else (args,), cls.keywords()

    return build


def rows_of_numbers():
    return torch.randn(2, 4)


class Base(nn.Module):
    """A linear layer of four features; ``inputs`` are the example, of batch size 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    def inputs():
        return rows_of_numbers()

    @staticmethod
    def keywords():
        return {}


def is_capturing():
    """As libraries ask: a torch that was built without CUDA raises."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


@contextmanager
def two_ranks():
    """A process group of which this process is one rank. The other one is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()

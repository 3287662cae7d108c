"""What a model's code, its graph and its outputs showed: places in the code, findings, receipts, disagreements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """``model.py:20``; the path is relative where it lies below the working folder, as pytest shows it."""
        path, here = Path(self.file), Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One hazard seen in the eager model: a stable id of the catalogue, where, what was seen, what to do."""

    id: str
    level: Level
    message: str
    fix: str
    evidence: str = ""
    site: Site | None = None
    loud: bool = True
    """Whether CUDA itself would refuse the capture (loud), or replay wrongly without a word (silent)."""
    called_from: Site | None = None
    """The innermost line of the user's project, where ``site`` lies in an installed library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof that a graph exists for a batch size: what was captured, at what price."""

    batch_size: int
    operations: int | None
    """Everything recorded, views included; None where the backend cannot count."""
    kernels: int | None
    """Non-view operations on the CPU twin, kernel nodes on CUDA; None where the backend cannot count."""
    kernel_names: Mapping[str, int] = field(default_factory=dict)
    not_counted: str = ""
    """Why there is no count; empty where there is one."""
    opaque_regions: int = 0
    """How many of the kernels are compiled regions the recorder cannot look into."""
    capture_ns: int = 0
    memory_bytes: int | None = None
    """Growth of the graph pool for this batch size; on the twin the bytes of its fixed buffers."""
    replays: int = 0
    """Launches of the graph since its capture, until the receipt was written."""
    fallbacks: tuple[str, ...] = ()
    """Calls that a graph should have answered and did not, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """That replay equals eager for one batch size, and how far that was looked at."""

    batch_size: int
    replays: int
    leaves: int
    """Tensors compared per replay."""
    state_tensors: int
    """Parameters, buffers and other state compared after each replay."""
    bit_exact: bool
    eager_repeatable: bool
    """Whether eager gave the same bits twice from the same state, inputs and seed."""
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    adversaries: tuple[str, ...] = ()
    """The kinds of adversarial inputs that were tried: those which eager takes, and which change the example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """That replay differs from eager: the first difference found, in the words of the check."""

    batch_size: int
    where: str
    """The output leaf (``output['logits']``) or the state (``buffer 'steps'``) that differs."""
    message: str
    evidence: tuple[str, ...] = ()
    finding_id: str | None = None
    assigned: tuple[str, ...] = ()
    """State and Python values (``layer.cached``) that eager assigns in its call, which a replay never does."""

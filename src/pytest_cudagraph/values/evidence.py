"""What the stages found, and what the gates judged of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """``model.py:20``. The path is relative if it is below the working folder."""
        path, here = Path(self.file), Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One hazard in the eager model: its id in the catalogue, the line, the evidence and the remedy."""

    id: str
    level: Level
    message: str
    fix: str
    evidence: str = ""
    site: Site | None = None
    loud: bool = True
    """Whether CUDA refuses the capture (loud). Otherwise the replay is wrong without an error (silent)."""
    called_from: Site | None = None
    """The innermost line of the user's project, where ``site`` lies in an installed library."""
    accepted: str = ""
    """Why the test's marker accepts it. Empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRule:
    """What a capture does with a custom operator. A plugin knows it, the audit cannot look inside."""

    operator: str
    """Its name with its namespace: ``mylib::topk``."""
    hazard: str | None = None
    """The id of the catalogue if CUDA refuses it or a replay would be wrong. None: it is legal in a graph."""
    reason: str = ""
    """Shown as the evidence: ``reads its output size on the host``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was captured for a batch size, and at what cost."""

    batch_size: int
    operations: int | None
    """All recorded operations, views included. None if the backend cannot count."""
    kernels: int | None
    """Non-view operations on the CPU twin, kernel nodes on CUDA. None if the backend cannot count."""
    kernel_names: Mapping[str, int] = field(default_factory=dict)
    not_counted: str = ""
    """Why there is no count. Empty if there is one."""
    opaque_regions: int = 0
    """How many kernels are compiled regions, which the recorder cannot inspect."""
    capture_ns: int = 0
    memory_bytes: int | None = None
    """Growth of the graph pool for this batch size. On the twin, the bytes of its fixed buffers."""
    replays: int = 0
    """Launches of the graph between its capture and the report."""
    fallbacks: tuple[str, ...] = ()
    """Calls that did not use their graph, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Replay equals eager at one batch size, with the extent of the comparison."""

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
    warnings: tuple[str, ...] = ()
    """Why the comparison proves almost nothing."""
    notes: tuple[str, ...] = ()
    adversaries: tuple[str, ...] = ()
    """The kinds of adversarial inputs that were used: those that eager accepts and that change the example."""
    not_judged: tuple[str, ...] = ()
    """What moves from call to call, so that later calls may differ, and cannot be tried."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """State or a Python value (``layer.cached``) that an eager call assigns, which a replay never does."""

    name: str
    site: Site | None = None
    """The line that assigned it. None unless a module's attribute was set."""
    called_from: Site | None = None
    """The line of the user's project, if ``site`` is a line of an installed library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Replay differs from eager: the first difference that the check found."""

    batch_size: int
    where: str
    """The output leaf (``output['logits']``) or the state (``buffer 'steps'``) that differs."""
    message: str
    evidence: tuple[str, ...] = ()
    finding_id: str | None = None
    assigned: tuple[Assigned, ...] = ()


class Verdict(str, Enum):
    """The result of one batch size, or of a whole test (the worst of its batch sizes)."""

    PASSED = "passed"
    NOT_JUDGED = "not-judged"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    WRONG = "wrong"
    NOT_CAPTURED = "not-captured"

    @property
    def severity(self) -> int:
        """0 for passed, higher for worse."""
        return list(Verdict).index(self)

    @property
    def words(self) -> str:
        """``not captured``."""
        return self.value.replace("-", " ")

    @property
    def fails(self) -> bool:
        """Whether a test with this verdict fails without strict mode."""
        return self in (Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One gate's result: a sentence (allowed, found), its evidence and its remedy."""

    gate: str
    """Its name: one of the core, or of a feature."""
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    accept: float | None = None
    """The setting of the gate that would let the result pass. None if no setting is the remedy."""
    hazard: str = ""
    """The hazard's id in the catalogue, if a hazard is the cause."""

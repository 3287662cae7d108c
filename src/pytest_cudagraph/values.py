"""The facts that stages hand to each other.

Every class here is frozen and dry: no torch, no pytest, no behaviour beyond a derived figure. Times are in
nanoseconds (``_ns``), memory in bytes (``_bytes``), ratios are plain factors (``_ratio``): 1.15 means 15 % faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

Kind = Literal["cuda", "cpu"]
"""What ran the work: CUDA graphs on a GPU, or the CPU twin."""

CompileMode = Literal["none", "inductor", "aot"]
Level = Literal["error", "note"]
Decision = Literal["pass", "fail", "open"]
"""What the evidence of a measurement says of its target; ``open``: neither, within the time it had."""

GateName = Literal["eager", "audit", "compile", "capture", "check", "speedup", "baseline", "structure", "base"]
Comparison = Literal["same", "faster", "slower", "uncertain", "new", "not-comparable", "off"]
"""A measurement beside the saved baseline; ``off``: no comparison was wanted."""


class Verdict(str, Enum):
    """What a test has shown of one batch size, or of the whole test (the worst of its batch sizes)."""

    PASSED = "passed"
    NOT_JUDGED = "not-judged"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    WRONG = "wrong"
    NOT_CAPTURED = "not-captured"

    @property
    def severity(self) -> int:
        """0 for passed, rising to the worst."""
        return list(Verdict).index(self)

    @property
    def fails(self) -> bool:
        """Whether a test with this verdict fails without strict mode."""
        return self in (Verdict.FAILED, Verdict.WRONG, Verdict.NOT_CAPTURED)


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
class DeviceInfo:
    """What the numbers of this run were measured on. Stable facts only: no clocks, no temperatures."""

    kind: Kind
    name: str
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    host_cpu: str
    platform: str
    threads: int
    mig: str | None = None
    """The MIG profile (``1g.18gb``); None on a whole GPU and on a CPU."""
    power_limit_w: int | None = None
    """The limit the driver enforces; None on a CPU, and where NVML does not tell."""
    clocks: str | None = None
    """The clock policy in words (``application clock 1980 MHz``); None as ``power_limit_w``."""

    @property
    def software(self) -> str:
        """What runs the kernels, as far as it decides their speed: ``Python 3.12.3, torch 2.11.0, driver 580.159``."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"Python {self.python}, torch {self.torch}{driver}"

    def hardware_changes(self, now: DeviceInfo) -> tuple[str, ...]:
        """What forbids to compare a latency of ``now`` with one of this: ``power limit 700 W -> 600 W``; else nothing.

        What one side does not tell (older files, no NVML) is no difference.
        """
        if (self.kind, self.name) != (now.kind, now.name):
            return (f"{self.name} ({self.kind}) -> {now.name} ({now.kind})",)
        changes = [f"MIG {self.mig or 'off'} -> {now.mig or 'off'}"] if self.mig != now.mig else []
        if None not in (self.power_limit_w, now.power_limit_w) and self.power_limit_w != now.power_limit_w:
            changes.append(f"power limit {self.power_limit_w} W -> {now.power_limit_w} W")
        if None not in (self.clocks, now.clocks) and self.clocks != now.clocks:
            changes.append(f"{self.clocks} -> {now.clocks}")
        return tuple(changes)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The distribution of one arm's samples; each sample is one synchronised call, host included."""

    samples: int
    minimum_ns: float
    q25_ns: float
    median_ns: float
    q75_ns: float
    q90_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One randomised block: the lower-quartile sample of each arm (see docs/statistics.md)."""

    eager_ns: float
    replay_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio with the 95 % interval obtained by inverting the sequential test that decided it."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measurement of eager against replay at one batch size."""

    eager: Latency
    replay: Latency
    speedup: Interval
    decision: Decision
    target_ratio: float | None
    """The speedup the evidence was collected against; None when speed is not judged."""
    blocks: int
    noise_ratio: float
    """Robust spread of the block log-ratios (1.4826 MAD): 0.004 means 0.4 %."""
    detectable_ratio: float
    """The smallest relative difference found in 80 of 100 runs with as much measuring (MDE)."""
    measure_ns: int
    seed: int
    compiled: Latency | None = None
    device_replay: Latency | None = None
    """Diagnostic second reading of the replay by device events; None on the twin. Never judged."""
    extended: bool = False
    drift_ratio: float = 1.0
    """Level of the eager arm in the last quarter of the run over the first quarter."""
    inner_calls: int = 1
    notes: tuple[str, ...] = ()
    reference: Latency | None = None
    """The reference workload between the blocks of this measurement; None where there was none."""
    busy_ns: float | None = None
    """What the kernels of one replay take by themselves; None where nothing told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one recorded run found of a replay: a baseline keeps some, to know how far unchanged runs differ."""

    date: str
    commit: str
    """Short; empty outside of a repository."""
    software: str
    """See :attr:`DeviceInfo.software`."""
    q25_ns: float
    median_ns: float
    reference_q25_ns: float | None = None
    """The reference workload of that run, to divide by like with like; see :attr:`Timing.reference`."""
    reference_median_ns: float | None = None
    unrest_log: float = 0.0
    """How much further apart than on a machine at rest the reference's quartiles lay, as a log-ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """What a baseline file holds of one test at one batch size."""

    name: str
    batch_size: int
    eager: Latency
    replay: Latency
    compiled: Latency | None
    speedup: Interval
    kernels: int | None
    kernel_names: Mapping[str, int]
    device: DeviceInfo
    saved_at: str
    sessions: tuple[Session, ...] = ()
    """The runs that found these kernels at this speed, oldest first; the latencies above are of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBaseline:
    """That there is nothing to compare with, and why."""

    comparison: Literal["new", "not-comparable", "off"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """One test at one batch size in two revisions, a pair of processes after the other.

    Each figure is one process's lower quartile; the n-th of ``head`` and of ``base`` were measured next to each other.
    """

    revision: str
    base_replay_ns: tuple[float, ...] = ()
    head_replay_ns: tuple[float, ...] = ()
    base_eager_ns: tuple[float, ...] = ()
    head_eager_ns: tuple[float, ...] = ()
    base_reference_ns: tuple[float, ...] = ()
    head_reference_ns: tuple[float, ...] = ()
    """The reference workload beside each of them; empty where a process has none."""
    base_kernels: int | None = None
    head_kernels: int | None = None
    change: Interval | None = None
    """Head's replay over base's: what was judged; None where there is nothing to compare."""
    missing: str = ""
    """Why there is nothing to compare, in words; empty where there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one gate says of one batch size: a sentence (allowed, found), its evidence, its remedy."""

    gate: GateName
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    hazard: str = ""
    """The id in the catalogue, where a hazard of the model is the cause; its page tells more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Everything known of one batch size at the end of its story."""

    batch_size: int
    judgements: tuple[Judgement, ...]
    min_speedup: float | None = None
    receipt: Receipt | None = None
    agreement: Agreement | None = None
    timing: Timing | None = None
    baseline: SavedBatch | NoBaseline | None = None
    comparison: Comparison = "off"
    compile_ns: int | None = None
    base: BaseComparison | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of the judgements; not judged when there is none."""
        return max((j.verdict for j in self.judgements), key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    @property
    def worst(self) -> Judgement | None:
        """The first judgement that carries the verdict."""
        return next((j for j in self.judgements if j.verdict is self.verdict), None)

    @property
    def word(self) -> str:
        """The verdict as tables and counts say it: ``slower`` for a missed baseline gate, else the verdict's words."""
        if self.verdict is Verdict.FAILED and self.worst is not None and self.worst.gate == "baseline":
            return "slower"
        return self.verdict.value.replace("-", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What the ``cudagraph`` fixture returns: one model, all its batch sizes."""

    nodeid: str
    name: str
    device: DeviceInfo | None
    compile_mode: CompileMode
    batches: tuple[BatchReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    """What concerns the model as a whole: audit errors, a failed compile."""
    compile_ns: int | None = None
    not_judged: tuple[str, ...] = ()
    """What no stage could look into (custom operators, opaque outputs)."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the model and of its batch sizes; not judged when nothing was."""
        found = [j.verdict for j in self.judgements] + [b.verdict for b in self.batches]
        return max(found, key=lambda v: v.severity, default=Verdict.NOT_JUDGED)

    def at(self, batch_size: int) -> BatchReport:
        """The report of one batch size; :class:`KeyError` names those there are."""
        for batch in self.batches:
            if batch.batch_size == batch_size:
                return batch
        raise KeyError(f"no batch size {batch_size}; there are {[b.batch_size for b in self.batches]}")

"""What the processes of a comparison leave behind, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudagraph.units import to_ns

DOCUMENT, MODULES, COURSE = "run.json", "modules.json", "course.json"
"""What a sampling process leaves in its folder.

The run as ``--cudagraph-json`` writes it, what it imported, and what it collected and how each test ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """What one process found of one test at one batch size. ``replay_ns`` is None where nothing was timed."""

    verdict: str
    eager_ns: float | None
    replay_ns: float | None
    """The lower quartile: the order statistic that a busy neighbour moves least (docs/statistics.md)."""
    reference_ns: float | None
    """The reference workload between the blocks of the same measurement, likewise."""
    kernels: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a test ended in one process (``failed in setup``), and what it said then, in a line; ``passed`` says none."""

    how: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process found, by test name and batch size, and the files of the modules it imported."""

    batches: Mapping[tuple[str, int], SampledBatch]
    modules: tuple[str, ...]
    nodeids: Mapping[str, str] = field(default_factory=dict)
    """Which test measured under a name, also one that came to no batch size."""
    ends: Mapping[str, End] = field(default_factory=dict)
    """Of every test that was collected, by node id; of a file or folder that was skipped as a whole, its own."""

    def end_of(self, nodeid: str) -> End | None:
        """How a test ended; None for one that was not collected."""
        whole = (end for place, end in self.ends.items() if nodeid.startswith((f"{place}::", f"{place}/")))
        return self.ends.get(nodeid) or next(whole, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """All that a process has left. ``trouble``: why it is not to be used; empty where it is."""

    sample: Sample
    trouble: str


def read_remains(folder: Path) -> Remains:
    """Read what a process has left in its folder; :class:`OSError` where it did not come to leave all of it."""
    document, modules, course = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in (DOCUMENT, MODULES, COURSE)
    )
    sample = Sample(
        batches=_batches(document),
        modules=tuple(modules),
        nodeids={test["name"]: test["nodeid"] for test in document["tests"]},
        ends={nodeid: End(how=how, why=why) for nodeid, (how, why) in course["ends"].items()},
    )
    return Remains(sample=sample, trouble=_trouble(course))


def _trouble(course: Mapping[str, Any]) -> str:
    if course["broken"]:
        return f"could not collect {course['broken'][0] or 'its tests'}"
    return "" if course["is_finished"] else "did not come to the end of its tests"


def foreign_modules(sample: Sample, top: Path, tree: Path) -> list[str]:
    """Modules that the process took from ``top`` although its own ``tree`` holds the very file."""
    found = [Path(file) for file in sample.modules if Path(file).is_relative_to(top)]
    return [str(file.relative_to(top)) for file in found if (tree / file.relative_to(top)).is_file()]


def _batches(document: Mapping[str, Any]) -> dict[tuple[str, int], SampledBatch]:
    return {
        (test["name"], batch["batch_size"]): _batch(batch) for test in document["tests"] for batch in test["batches"]
    }


def _batch(batch: Mapping[str, Any]) -> SampledBatch:
    return SampledBatch(
        verdict=batch["verdict"],
        eager_ns=_quartile_ns(batch["eager"]),
        replay_ns=_quartile_ns(batch["replay"]),
        reference_ns=_quartile_ns(batch["reference"]),
        kernels=batch["kernels"],
    )


def _quartile_ns(latency: Mapping[str, Any] | None) -> float | None:
    return None if latency is None or latency["q25"] is None else to_ns(float(latency["q25"]))


def module_files(modules: Iterable[Any]) -> list[str]:
    """The files of modules, as absolute paths; what has no file (built-in, a namespace) is left out."""
    files = (getattr(module, "__file__", None) for module in modules)
    return sorted({str(Path(file).resolve()) for file in files if isinstance(file, str)})

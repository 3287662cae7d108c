"""The page of what GPUs have shown: Markdown from evidence files, and the data of its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence import evidence

from pytest_cudagraph.units import bytes_text, factor_text, latency_text, percent_text, seconds_text, to_ns

FIGURES = ("gpu-speedup.svg", "gpu-attainable.svg")
OTHER_ARMS = ("inductor-replay", "aot-replay", "graphed-callables", "reduce-overhead")

_TITLE = "# What GPUs have shown"
_MADE = "<!-- made by benchmarks/gpu_page.py; do not edit -->"
_NO_EVIDENCE = """\
**No GPU has run this code yet.** The CPU twin, the statistics and all other code run on every machine. Statements about
the driver and about GPUs in these pages are expectations, not measurements.

CI runs the CUDA backend, `tests/gpu` and the conformance suite on torch's CUDA build over an emulated device
([emulator](../emulator/README.md)). That run is no evidence of a GPU, and `benchmarks/gpu.py` refuses it:

| what | there |
|---|---|
| torch's C++: allocator, pools of graphs, graphs, generators, streams, events, texts of errors | real |
| the driver's rules of capture, queues, error codes | imitated from NVIDIA's documents |
| kernels | imitated by torch's CPU kernels |
| NVML | memory is real, the rest are constants or what a test asks for |
| the driver itself, speed, cuBLAS, cuDNN, Triton, numerics of a GPU | not shown by any run |

To change that, run three commands on a machine with a GPU. The first two run the tests that need a GPU. The third
asks for the rules of capture, prints where the GPU's answers differ, measures, and writes the evidence for this page:

```
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src python3 -m pytest -p pytest_cudagraph.plugin tests/gpu
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src python3 -m pytest -p pytest_cudagraph.plugin tests/conformance -m gpu
python3 benchmarks/gpu.py
```

They use this source tree, whether or not the package is installed. `python -m tox run -e gpu` runs the first two.

These questions are open until a GPU runs the tests:

| question | tests |
|---|---|
| does the process continue after each refusal, and is its memory released | `tests/gpu/test_refused.py` |
| does a graph stay correct while other graphs are closed, refused or captured | `tests/gpu/test_neighbours.py` |
| do the driver, NVIDIA's bindings and the profiler count the same kernels | `tests/gpu/test_receipt.py` |
| do replays draw from a model's own generators like eager | `tests/gpu/test_generators.py` |
| are compiled code with its own graphs and threaded packages refused | `tests/gpu/test_nested.py` |
| is a changed model, training flag or autocast state always noticed | `tests/gpu/test_changed_models.py` |
| do twin and CUDA disagree only in the rows of the table in `twin.md` | `tests/conformance` |
| do NVML's readings agree with `nvidia-smi` | `tests/gpu/test_monitor.py` |
| are blocks discarded beside another process, and none on an unshared GPU | `tests/gpu/test_shared_gpu.py` |
| can processes of `--cudagraph-base` measure while their parent pytest waits | `tests/gpu/test_base_revision.py` |
| are baselines of another GPU or power limit not changed | `tests/gpu/test_baselines.py` |
| does each xdist worker measure on the GPU that it took (needs two GPUs) | `tests/gpu/test_fleet.py` |

There is no test of several GPUs in one process, or of NCCL's watchdog threads.
"""

Cells = dict[tuple[str, int], Mapping[str, Any]]


def page(folder: Path) -> str:
    """The text of ``docs/gpu.md``. Raises :class:`.evidence.ForeignEvidence` for a rehearsal."""
    runs = latest_of_each_device(folder)
    body = "\n".join(_run(run) for run in runs) if runs else _NO_EVIDENCE
    return f"{_MADE}\n{_TITLE}\n\n{body}"


def latest_of_each_device(folder: Path) -> list[dict[str, Any]]:
    """The newest run of every device, by the device's name."""
    latest: dict[str, dict[str, Any]] = {}
    for run in sorted((evidence.read(path) for path in evidence.files(folder)), key=lambda run: str(run["began_at"])):
        latest[run["device"]["name"]] = run
    return [latest[name] for name in sorted(latest)]


def cells_of(run: Mapping[str, Any]) -> Cells:
    """Cells by model and batch size; one measured again, with more arms, replaces the first."""
    return {(cell["model"], cell["batch_size"]): cell for cell in run["cells"]}


def attainable(run: Mapping[str, Any]) -> list[tuple[str, int, float, float]]:
    """Model, batch size, speedup realised, and the one that would be left if only kernels took time.

    Their time is the profiler's; where that has seen none, the device's events, which also hold the gaps.
    """
    busy = {(each["model"], each["batch_size"]): each["replay"]["busy_ns"] for each in run["kernel_time"]}
    found = []
    for (model, size), cell in cells_of(run).items():
        busy_ns = busy.get((model, size)) or _of_replay(cell, "device_ns", None)
        if busy_ns and cell["speedup"] is not None:
            limit = cell["arms"]["eager"]["median_ns"] / busy_ns
            found.append((model, size, float(cell["speedup"]["estimate"]), limit))
    return found


def _run(run: Mapping[str, Any]) -> str:
    device, source = run["device"], run["source"]
    dirty = ", with changes that were not committed" if source["dirty"] else ""
    when = run["began_at"][:10]
    about = (
        f"{device['name']}, driver {device['driver']}, CUDA {device['cuda']}, torch {device['torch']}, Python "
        f"{device['python']}, {device['host_cpu']}; {when}, source tree `{source['tree'][:10]}`{dirty}. "
        f"{_clocks(run)}"
    )
    parts = [
        f"## {device['name']}\n",
        f"{about}\n",
        *_speedups(run),
        *_other_arms(run),
        *_figures(run),
        *_facts(run),
        *_rules(run),
    ]
    return "\n".join([*parts, *_left_out(run)]).rstrip() + "\n"


def _clocks(run: Mapping[str, Any]) -> str:
    slowed = sorted({reason for gpu in run["clocks"] for reason in gpu["slowdowns"]})
    shared = any(gpu["is_shared"] for gpu in run["clocks"])
    if not run["clocks"]:
        return "NVML gave no readings."
    return (
        f"Clocks held down: {', '.join(slowed) or 'never'}; other processes on the GPU: {'yes' if shared else 'none'}."
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _speedups(run: Mapping[str, Any]) -> list[str]:
    limits = {(model, size): limit for model, size, _, limit in attainable(run)}
    head = ("model", "batch", "eager", "replay", "speedup (95 %)", "attainable", "kernels", "memory", "check")
    rows = [
        (
            model,
            str(size),
            _median(cell, "eager"),
            _median(cell, "replay"),
            _speedup(cell),
            factor_text(limits[(model, size)]) if (model, size) in limits else "",
            str(_of_replay(cell, "kernels", "")),
            bytes_text(_of_replay(cell, "memory_bytes", 0)),
            cell["check"],
        )
        for (model, size), cell in sorted(cells_of(run).items())
    ]
    about = (
        "Attainable: eager's latency over the time the replay's kernels alone take, by the profiler or else by events."
    )
    return [*_table(head, rows), about, ""]


def _of_replay(cell: Mapping[str, Any], key: str, missing: Any) -> Any:
    found = cell["arms"].get("replay", {}).get(key)
    return missing if found is None else found


def _median(cell: Mapping[str, Any], arm: str) -> str:
    found = cell["arms"].get(arm)
    if found is None:
        return ""
    return latency_text(found["median_ns"]) if "median_ns" in found else "failed"


def _speedup(cell: Mapping[str, Any]) -> str:
    found = cell["speedup"]
    if found is None:
        return ""
    ends = [f"{found[end]:.2f}" if found[end] is not None else "?" for end in ("low", "high")]
    return f"{factor_text(found['estimate'])} ({'-'.join(ends)})"


def _other_arms(run: Mapping[str, Any]) -> list[str]:
    head = ("model", "batch", "eager", "replay", *OTHER_ARMS)
    rows = [
        (model, str(size), *(_median(cell, arm) for arm in ("eager", "replay", *OTHER_ARMS)))
        for (model, size), cell in sorted(cells_of(run).items())
    ]
    reasons = sorted(
        {
            f"- {arm}, {model} at batch {size}: {cell['arms'][arm]['reason']}"
            for (model, size), cell in cells_of(run).items()
            for arm in cell["arms"]
            if "reason" in cell["arms"][arm]
        }
    )
    failed = ["Arms that failed:", "", *reasons, ""] if reasons else []
    return ["### Other ways to save launches\n", *_table(head, rows), *failed]


def _figures(run: Mapping[str, Any]) -> list[str]:
    if not run["cells"]:
        return []
    return [
        f"![Speedup of replay over eager against the batch size]({FIGURES[0]})",
        "",
        f"![Realised against attainable speedup]({FIGURES[1]})",
        "",
    ]


def _facts(run: Mapping[str, Any]) -> list[str]:
    lines = []
    if run["overhead"]:
        cost = run["overhead"]["difference_ns"]
        lines.append(
            f"- One call of ours costs {latency_text(cost['median'])} more than a bare copy and launch (quartiles "
            f"{latency_text(cost['q25'])} to {latency_text(cost['q75'])}; the goal is at most 3 µs)."
        )
    watching = run.get("monitor")
    if watching:
        after, without = (latency_text(watching[key]["median_ns"]) for key in ("replay_after_reading", "replay"))
        lines.append(
            f"- One reading of the monitor takes {latency_text(watching['reading']['median_ns'])}; a replay takes "
            f"{after} right after one, {without} otherwise."
        )
    for each in run["verdicts"]:
        lines.append(
            f"- {each['model']} at batch {each['batch_size']}: {each['decision']} against "
            f"{factor_text(each['target_ratio'])} after {seconds_text(to_ns(each['seconds']))} "
            f"(noise {percent_text(each['noise_ratio'])})."
        )
    alarms = run["false_alarms"]
    if alarms:
        lines.append(f"- False alarms of the gate, one graph against itself: {_alarms(alarms)}.")
    return [*lines, ""] if lines else []


def _alarms(alarms: Mapping[str, Any]) -> str:
    """``0 of 200, 3 undecided; a verdict took 0.3 s (9 of 10 at most 0.4 s)``; older evidence tells no times."""
    said = f"{alarms['decisions']['fail']} of {alarms['runs']}, {alarms['decisions']['open']} undecided"
    if "q90_seconds" not in alarms:
        return said
    typical, most = (seconds_text(to_ns(alarms[key])) for key in ("median_seconds", "q90_seconds"))
    why = f"; blocks thrown away: {alarms['discarded']}" if alarms["discarded"] else ""
    return f"{said}; a verdict took {typical} (9 of 10 at most {most}){why}"


def _rules(run: Mapping[str, Any]) -> list[str]:
    """Where the GPU answers a rule of capture differently; older evidence has no rules."""
    found = run.get("rules")
    if not found:
        return []
    rows = [[_cell(each[key]) for key in ("rule", "found", "expected")] for each in found["differences"]]
    about = f"{found['equal']} of {found['asked']} answers are those of the emulated device ({found['expected_of']})."
    table = _table(("rule", "this GPU", "emulated"), rows) if rows else []
    return ["### Rules of capture\n", about, "", *table]


def _cell(text: str | None) -> str:
    return "not asked" if text is None else text.replace("|", "\\|")


def _left_out(run: Mapping[str, Any]) -> list[str]:
    missing = [*run["left_out"], *run["failures"]]
    if run["ended_at"] is None:
        missing.append("the run was cut short")
    return ["Not measured:", "", *(f"- {line}" for line in missing), ""] if missing else []

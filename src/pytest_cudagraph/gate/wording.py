"""The phrases that several gates share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Literal

from pytest_cudagraph import baseline
from pytest_cudagraph.baseline import PRIOR_SPREAD
from pytest_cudagraph.units import factor_text, first_of, latency_text, percent_text, plural, seconds_text, signed_text
from pytest_cudagraph.values import DeviceInfo, Interval, Judgement, LatencyChange, SavedBatch, Timing, Verdict

SESSION_NOISE_LOG = 2 * PRIOR_SPREAD
"""Two standard deviations, as a log-ratio. A smaller change may come from the session, not from the code."""

FIGURES = {"ttft": "TTFT", "itl": "ITL", "time_per_token": "time per token"}
"""Figures of generations, by their names in a baseline."""

_NAMES_SHOWN = 5

_SOFTWARE = (
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("python", "Python"),
    ("host_cpu", "host CPU"),
    ("platform", "platform"),
    ("threads", "threads"),
)


def change_text(before_ns: float, after_ns: float) -> str:
    """``151.2 -> 120.0 µs``; both units where they differ: ``1.1 ms -> 980.0 µs``."""
    before, after = latency_text(before_ns), latency_text(after_ns)
    number, unit = before.rsplit(" ", 1)
    return f"{number} -> {after}" if after.endswith(f" {unit}") else f"{before} -> {after}"


def changes_text(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """``+16 aten.mul, -1 aten.add``: the largest changes first, a few of them."""
    difference = Counter(after)
    difference.subtract(before)
    changed = sorted(
        ((count, name) for name, count in difference.items() if count), key=lambda item: (-abs(item[0]), item[1])
    )
    return first_of([f"{count:+d} {name}" for count, name in changed], _NAMES_SHOWN)


def not_judged(judgement: Judgement, what: str, why: str) -> Judgement:
    """The same facts without a verdict: ``speed is not judged: 4 xdist workers share this machine``."""
    evidence = (judgement.reason, *judgement.evidence)
    reason = f"{what} is not judged: {why}"
    return replace(judgement, verdict=Verdict.NOT_JUDGED, reason=reason, evidence=evidence, remedy="")


def interval_text(speedup: Interval) -> str:
    """``95% interval 1.05-1.09``, or words if there are too few blocks for any bound."""
    if speedup.low <= 0.0 and math.isinf(speedup.high):
        return "too few blocks for an interval"
    if math.isinf(speedup.high):
        return f"95% interval from {factor_text(speedup.low)}"
    return f"95% interval {speedup.low:.2f}-{speedup.high:.2f}"


Over = Literal["eager", "compiled"]
"""What a replay is faster than."""


def found_text(timing: Timing, over: Over = "eager") -> str:
    """``replay is 1.07x eager (95% interval 1.05-1.09)``."""
    other = "eager" if over == "eager" else "the compiled code"
    return f"replay is {factor_text(timing.speedup.estimate)} {other} ({interval_text(timing.speedup)})"


def timing_text(timing: Timing, device: DeviceInfo | None = None, over: Over = "eager") -> str:
    """``eager 120.0 µs, replay 112.1 µs, 34 interleaved blocks in 0.9 s, noise floor 0.4 %``.

    The latencies are those of the judged blocks. Times of the CPU twin begin with ``cpu:``, to distinguish them from
    a GPU's.
    """
    medians = timing.medians
    arms = f"{over} {latency_text(medians.eager_ns)}"
    if medians.compiled_ns is not None:
        arms += f", compiled {latency_text(medians.compiled_ns)}"
    label = "cpu: " if device is not None and device.kind == "cpu" else ""
    blocks = plural(timing.blocks, "interleaved block")
    noise = f", noise floor {percent_text(timing.noise_ratio)}" if timing.blocks > 1 else ""
    replay = latency_text(medians.replay_ns)
    return f"{label}{arms}, replay {replay}, {blocks} in {seconds_text(timing.measure_ns)}{noise}"


_QUIET_RATIO = 0.05


def is_quiet(timing: Timing) -> bool:
    """Whether the noise floor is below 5 %. Above it no limit of the model is stated, and no lower gate offered."""
    return timing.blocks > 1 and timing.noise_ratio < _QUIET_RATIO


def attainable_text(timing: Timing, min_speedup: float, kernels: int | None) -> str:
    """``1.02x of at most 1.03x: compute-bound; 46 kernels take 116.5 µs by themselves``. Empty without a reading."""
    attainable = timing.attainable_ratio
    if attainable is None or not timing.busy_ns:
        return ""
    text = f"{factor_text(timing.speedup.estimate)} of at most {factor_text(attainable)}"
    if attainable < min_speedup and is_quiet(timing):
        text += ": compute-bound"
    elif attainable > 1.0:
        share = max(timing.speedup.estimate - 1.0, 0.0) / (attainable - 1.0)
        text += f": {share:.0%} of what a graph can gain".replace("%", " %")
    latency = latency_text(timing.busy_ns)
    if kernels == 1:
        return f"{text}; 1 kernel takes {latency} by itself"
    return f"{text}; {'its' if kernels is None else kernels} kernels take {latency} by themselves"


def moved_text(
    timing: Timing,
    saved: SavedBatch,
    change: LatencyChange,
    device: DeviceInfo | None = None,
    *,
    other_kernels: bool = False,
) -> str:
    """Which side changed since the baseline, by the statistic of ``change``. The ratio alone does not show it.

    With ``device``, sides that run on the host are not compared across CPU models. The reference workload
    distinguishes a slower machine from a slower model. With ``other_kernels`` the machine is never the only cause.
    """
    arms = [("eager", saved.eager, timing.eager), ("compiled", saved.compiled, timing.compiled)]
    level = attrgetter("q25_ns" if change.what == "lower quartile" else "median_ns")
    sides = [(arm, level(before), level(after)) for arm, before, after in arms if before and after]
    replay = ("replay", change.before_ns, change.after_ns)
    if device is not None and device.host_cpu != saved.device.host_cpu:
        lost = " and ".join(arm for arm, _, _ in sides)
        moved = _sides_text([replay], change.reference_ns, other_kernels)
        return f"{moved}; {lost}: not compared, the host's CPU is another"
    return _sides_text([*sides, replay], change.reference_ns, other_kernels)


def _sides_text(
    sides: Sequence[tuple[str, float, float]], reference_ns: tuple[float, float] | None, other_kernels: bool
) -> str:
    """``eager did not change (90.0 -> 90.2 µs), replay got slower than in the baseline (60.0 -> 75.0 µs): ...``."""
    moves = {arm: _moved(before, after) for arm, before, after in sides}
    shown = {arm: f"{arm} {{}} ({change_text(before, after)})" for arm, before, after in sides}
    if not any(moves.values()):
        return f"since the baseline {', '.join(shown[arm].format('did not change') for arm in moves)}"
    words = {arm: f"got {move}" if move else "did not change" for arm, move in moves.items()}
    first = next(arm for arm, move in moves.items() if move)
    words[first] += " than in the baseline"
    text = ", ".join(shown[arm].format(words[arm]) for arm in moves)
    _, before_ns, after_ns = sides[-1]
    culprit = _culprit(moves, after_ns / before_ns, reference_ns, other_kernels)
    return f"{text}; {culprit}" if culprit else text


def _culprit(
    moves: Mapping[str, str], replay_ratio: float, reference_ns: tuple[float, float] | None, other_kernels: bool
) -> str:
    """The likely cause of a slowdown, from the sides that got slower. Empty if the replay did not."""
    if moves["replay"] == "slower" and other_kernels:
        is_machine = reference_ns is not None and _moved(*reference_ns) == "slower"
        return f"the graph runs other kernels{', and the machine is slower too' if is_machine else ''}"
    others = [moves[arm] for arm in moves if arm != "replay"]
    if moves["replay"] != "slower" or not others:
        return ""
    if not any(others):
        return "replay alone: what is captured, not the model"
    if all(move == "slower" for move in others):
        if reference_ns is None:
            return "all sides alike: the model or the machine"
        if _moved(*reference_ns) == "slower":
            before_ns, after_ns = reference_ns
            is_all = _moved(after_ns / before_ns, replay_ratio) != "slower"
            return f"the reference workload as well{': the machine' if is_all else ', by less: machine and model'}"
        return "all sides alike: the model itself"
    if moves.get("compiled") == "slower":
        return "compiled and replay: the code that the compiler made"
    return ""


def _moved(before_ns: float, after_ns: float) -> str:
    log_change = math.log(after_ns / before_ns)
    if abs(log_change) <= SESSION_NOISE_LOG:
        return ""
    return "slower" if log_change > 0 else "faster"


def software_changes(before: DeviceInfo, after: DeviceInfo) -> tuple[str, ...]:
    """``torch 2.11.0 -> 2.13.0``: every change since the baseline except hardware."""
    facts = [(words, getattr(before, name), getattr(after, name)) for name, words in _SOFTWARE]
    changed = [f"{words} {old or 'none'} -> {new or 'none'}" for words, old, new in facts if old != new]
    return (f"since the baseline: {', '.join(changed)}",) if changed else ()


_ALIKE_LOG = 0.005
"""With a smaller difference, the change is shown without the reference workload."""


def replaced_text(saved: SavedBatch, new: SavedBatch) -> str:
    """``replay 56.7 -> 243.9 µs (+330 %), 32 -> 62 kernels``. Empty if neither changed, as after an upgrade.

    A latency has changed if it does not continue the saved history (:func:`pytest_cudagraph.baseline.is_continued`).
    """
    hardware = saved.device.hardware_changes(new.device)
    if hardware:
        return f"other hardware: {', '.join(hardware)}"
    change = baseline.change(saved, new.sessions[-1])
    kernels = _kernels_text(saved, new)
    alike = {name: getattr(saved, name) for name in ("kernels", "kernel_names", "device", "compiled")}
    has_moved = not baseline.is_continued(saved, replace(new, **alike))
    texts = [f"{_latency_text(change)}{kernels}"] if has_moved or kernels else []
    texts += [_latency_text(each, FIGURES.get(name, name)) for name, each in baseline.moved_figures(saved, new).items()]
    return ", ".join(texts)


def _latency_text(change: LatencyChange, subject: str = "replay") -> str:
    raw = change.after_ns / change.before_ns
    moved = signed_text(raw)
    if abs(math.log(raw) - change.log_ratio) > _ALIKE_LOG:
        moved += f"; {signed_text(math.exp(change.log_ratio))} relative to the reference workload"
    # Tables show medians. Another statistic is named, because the two may differ.
    named = "" if change.what == "median" else f"{change.what} "
    return f"{subject} {named}{change_text(change.before_ns, change.after_ns)} ({moved})"


def _kernels_text(saved: SavedBatch, new: SavedBatch) -> str:
    if saved.kernels is None or new.kernels is None:
        return ""
    if saved.kernels != new.kernels:
        return f", {saved.kernels} -> {plural(new.kernels, 'kernel')}"
    changed = changes_text(saved.kernel_names, new.kernel_names)
    return f", other kernels: {changed}" if changed else ""

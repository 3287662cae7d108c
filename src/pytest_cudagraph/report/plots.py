"""Plots of the HTML page as inline SVG: intervals, latencies, saved sessions.

A library would draw four plots per test for seconds, and a thousand tests would exceed the page's size. Here each kind
of mark of a plot is one path. Only numbers enter, so that nothing has to be escaped. Colours are in the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_cudagraph.units import latency_text

if TYPE_CHECKING:
    from markupsafe import Markup

_WIDTH = 280
"""Pixels. A screen of 320 pixels shows a plot whole."""

_GUTTER = 38
"""Pixels left of a plot for its labels."""

_MOST_LABELS = 8
"""Batch sizes below a plot. With more, every second or third is named."""

_RATIO_TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)

_FINE_TICKS = tuple(each / 20 for each in range(10, 40))
"""For speedups that are near each other."""

_MOST_TICKS = 4

_LABEL = 52
"""Pixels that the text of a latency needs."""


class SpeedupPoint(NamedTuple):
    """The speedup at one batch size. ``high`` may be infinite, ``low`` zero: no bound was found."""

    batch_size: int
    estimate: float
    low: float
    high: float
    target: float | None = None
    attainable: float | None = None


class LatencyLane(NamedTuple):
    """The distribution of one arm at one batch size, in nanoseconds."""

    batch_size: int
    arm: str
    minimum: float
    q25: float
    median: float
    q75: float
    q90: float


class SessionLane(NamedTuple):
    """The sessions of one batch size, today's value, and the prediction interval. In nanoseconds."""

    batch_size: int
    saved: Sequence[float]
    today: float | None
    low: float | None
    high: float | None


class _Scale:
    """A logarithmic axis from values to pixels."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        logs = [math.log(each) for each in values if each > 0 and math.isfinite(each)] or [0.0]
        # A scale of equal values still has a width.
        margin = max(0.02, 0.06 * (max(logs) - min(logs)))
        self._low, self._high = min(logs) - margin, max(logs) + margin
        self._start, self._end = start, end

    def at(self, value: float) -> str:
        """The pixel of a value. Values beyond the axis are at its end."""
        log = self._high if math.isinf(value) else self._low if value <= 0 else math.log(value)
        share = (min(max(log, self._low), self._high) - self._low) / (self._high - self._low)
        return _pixel(self._start + share * (self._end - self._start))

    def ticks(self, candidates: Iterable[float]) -> list[float]:
        inside = [each for each in candidates if self._low <= math.log(each) <= self._high]
        return inside[:: max(1, math.ceil(len(inside) / _MOST_TICKS))]


def speedup_scale(points: Iterable[SpeedupPoint]) -> Callable[[SpeedupPoint], str]:
    """The small mark of a table's row: interval, estimate, target and attainable speedup, on one scale for all rows."""
    points = list(points)
    scale = _Scale(_ratios(points), 2, 108)

    def mark(point: SpeedupPoint) -> str:
        parts = [_path("l", f"M{scale.at(point.low)} 7H{scale.at(point.high)}")]
        if point.target is not None:
            parts.append(_path("t", f"M{scale.at(point.target)} 1V13"))
        if point.attainable is not None:
            parts.append(_path("a", _diamond(scale.at(point.attainable), "7")))
        parts.append(_path("d", f"M{scale.at(point.estimate)} 7h0"))
        return f"<svg class=m>{''.join(parts)}</svg>"

    return mark


def _ratios(points: Iterable[SpeedupPoint]) -> Iterator[float]:
    yield 1.0
    for each in points:
        yield from (value for value in each[1:] if value)


def speedup_plot(points: Sequence[SpeedupPoint]) -> str:
    """Speedup over batch size with intervals, the target line and attainable speedups. Empty without points."""
    if not points:
        return ""
    height, bottom = 132, 112
    scale = _Scale(_ratios(points), bottom, 8)
    across = _across([each.batch_size for each in points])
    ticks = _RATIO_TICKS if len(scale.ticks(_RATIO_TICKS)) > 1 else _FINE_TICKS
    parts = [_tick_rows(scale, ticks, lambda value: f"{value:g}x")]
    parts.append(_labels_below(across, height))
    targets = [(across[each.batch_size], each.target) for each in points if each.target is not None]
    parts.append(_path("t", "".join(f"M{_pixel(x - 9)} {scale.at(target)}h18" for x, target in targets)))
    limits = [(across[each.batch_size], each.attainable) for each in points if each.attainable is not None]
    parts.append(_path("a", "".join(_diamond(_pixel(x), scale.at(limit)) for x, limit in limits)))
    whole = "".join(f"M{_pixel(across[e.batch_size])} {scale.at(e.low)}V{scale.at(e.high)}" for e in points)
    parts.append(_path("l", whole))
    parts.append(_path("d", "".join(f"M{_pixel(across[e.batch_size])} {scale.at(e.estimate)}h0" for e in points)))
    return _svg(height, parts)


def _across(sizes: Sequence[int]) -> dict[int, float]:
    """The middle of each batch size's column."""
    step = (_WIDTH - _GUTTER - 8) / len(sizes)
    return {size: _GUTTER + 4 + step * (index + 0.5) for index, size in enumerate(sizes)}


def _labels_below(across: dict[int, float], height: int) -> str:
    every = math.ceil(len(across) / _MOST_LABELS)
    shown = list(across.items())[::every]
    return "".join(f"<text x={_pixel(x)} y={height - 6} class=h>{size}</text>" for size, x in shown)


def _tick_rows(scale: _Scale, candidates: Iterable[float], text_of: Callable[[float], str]) -> str:
    ticks = scale.ticks(candidates)
    lines = _path("g", "".join(f"M{_GUTTER} {scale.at(each)}H{_WIDTH}" for each in ticks))
    texts = (f"<text x={_GUTTER - 6} y={_down(scale.at(each))} class=r>{text_of(each)}</text>" for each in ticks)
    return lines + "".join(texts)


def latency_plot(lanes: Sequence[LatencyLane]) -> str:
    """Latencies: a thin line from minimum to 90 %, a bar between the quartiles, a gap at the median.

    Empty without lanes.
    """
    if not lanes:
        return ""
    scale = _Scale((value for lane in lanes for value in (lane.minimum, lane.q90)), _GUTTER, _WIDTH - 4)
    y, bottom, labels = _stacked(lanes)
    parts = [_tick_columns(scale, _time_ticks(lanes), bottom)]
    parts += [f"<text x={_GUTTER - 6} y={_pixel(at + 4)} class=r>{size}</text>" for size, at in labels]
    for arm in dict.fromkeys(lane.arm for lane in lanes):
        own = [(lane, _pixel(at)) for lane, at in zip(lanes, y, strict=True) if lane.arm == arm]
        thin = "".join(f"M{scale.at(lane.minimum)} {at}H{scale.at(lane.q90)}" for lane, at in own)
        thick = "".join(f"M{scale.at(lane.q25)} {at}H{scale.at(lane.q75)}" for lane, at in own)
        middle = "".join(f"M{scale.at(lane.median)} {at}h0" for lane, at in own)
        marks = f'<path d="{thin}"/>{_path("q", thick)}{_path("c", middle)}'
        parts.append(f"<g class={arm}>{marks}</g>")
    return _svg(bottom + 20, parts)


def _stacked(lanes: Sequence[LatencyLane]) -> tuple[list[float], int, list[tuple[int, float]]]:
    """The height of each lane, the end of the last one, and the middle of each batch size's lanes."""
    heights: dict[int, list[float]] = {}
    at, y = 2.0, []
    for lane in lanes:
        at += 9.0 if lane.batch_size in heights else 15.0
        heights.setdefault(lane.batch_size, []).append(at)
        y.append(at)
    return y, math.ceil(at + 10), [(size, sum(own) / len(own)) for size, own in heights.items()]


def _time_ticks(lanes: Sequence[LatencyLane]) -> list[float]:
    decade = 10.0 ** math.floor(math.log10(max(min(lane.minimum for lane in lanes), 1e-3)))
    return [decade * 10.0**power * step for power in range(9) for step in (1, 2, 5)]


def _tick_columns(scale: _Scale, candidates: Iterable[float], bottom: int) -> str:
    ticks = scale.ticks(candidates)
    lines = _path("g", "".join(f"M{scale.at(each)} 4V{bottom}" for each in ticks))
    texts = (
        f"<text x={scale.at(each)} y={bottom + 14} class=h>{latency_text(each).replace('.0 ', ' ')}</text>"
        for each in ticks
    )
    return lines + "".join(texts)


_LANE = 36


def history_plot(lanes: Sequence[SessionLane]) -> str:
    """The saved sessions of each batch size, the prediction interval and today's value. Empty without sessions."""
    lanes = [lane for lane in lanes if lane.saved]
    if not lanes:
        return ""
    parts, dots, bands, today = [], [], [], []
    for index, lane in enumerate(lanes):
        top = index * _LANE + 5
        scale = _Scale([*lane.saved, *(each for each in lane[2:] if each)], top + _LANE - 8, top)
        parts.append(f"<text x={_GUTTER - 6} y={top + 18} class=r>{lane.batch_size}</text>")
        step = (_WIDTH - _GUTTER - 24) / len(lane.saved)
        dots += [f"M{_pixel(_GUTTER + 8 + step * at)} {scale.at(each)}h0" for at, each in enumerate(lane.saved)]
        if lane.low is not None and lane.high is not None:
            bands.append(f"M{_GUTTER} {scale.at(lane.low)}H{_WIDTH}V{scale.at(lane.high)}H{_GUTTER}z")
        today += [] if lane.today is None else [f"M{_WIDTH - 10} {scale.at(lane.today)}h0"]
    parts += [_path("u", "".join(bands)), _path("s", "".join(dots)), _path("d", "".join(today))]
    return _svg(len(lanes) * _LANE + 8, parts)


def trend_plot(parts: Sequence[Sequence[float]], side: str) -> str:
    """The sessions of a side over time: a dot each, and its level between two change points. Empty without sessions."""
    if not parts:
        return ""
    bottom = 96
    scale = _Scale((value for part in parts for value in part), bottom - 8, 26)
    step, at = (_WIDTH - 8) / sum(map(len, parts)), 4.0
    dots, levels, changes, texts = [], [], [], []
    for part in parts:
        end = at + step * len(part)
        dots += [f"M{_pixel(at + step * (index + 0.5))} {scale.at(value)}h0" for index, value in enumerate(part)]
        level = math.exp(sum(map(math.log, part)) / len(part))
        levels.append(f"M{_pixel(at + 2)} {scale.at(level)}H{_pixel(end - 2)}")
        changes += [f"M{_pixel(at)} 4V{bottom}"] if at > 4.0 else []
        if end - at > _LABEL:
            texts.append(f"<text x={_pixel((at + end) / 2)} y=14 class=h>{latency_text(level)}</text>")
        at = end
    marks = _path("v", "".join(levels)) + _path("o", "".join(dots))
    return _svg(bottom, [_path("g", "".join(changes)), *texts, f"<g class={side}>{marks}</g>"])


def _diamond(x: str, y: str) -> str:
    return f"M{x} {y}m-3 0 3-3 3 3-3 3z"


def _path(kind: str, data: str) -> str:
    return f'<path class={kind} d="{data}"/>' if data else ""


def _svg(height: int, parts: Iterable[str]) -> str:
    return f'<svg class=p aria-hidden=true viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg>'


def _down(pixel: str) -> str:
    """The base of a text whose middle is at ``pixel``."""
    return str(int(pixel) + 4)


def _pixel(value: float) -> str:
    # A whole one: a thousand tests hold a quarter of a million numbers.
    return f"{value:.0f}"


def drawn(svg: str) -> Markup:
    """A plot as it stands in a page: it holds numbers only."""
    from markupsafe import Markup

    return Markup(svg)

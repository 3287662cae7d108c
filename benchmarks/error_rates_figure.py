"""Make docs/error_rates.svg and the table of docs/statistics.md from the JSON file of gate_error_rates.py.

    python benchmarks/error_rates_figure.py                                  rewrites both
    python benchmarks/error_rates_figure.py --json rates.json --check        exits 1 where they differ

Pools calls up to 2 ms over every noise whose true speedup is known. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JSON = ROOT / "benchmarks" / "data" / "gate_error_rates.json"
FIGURE = ROOT / "docs" / "error_rates.svg"
PAGE = ROOT / "docs" / "statistics.md"

_BEGIN, _END = "<!-- rates: begin -->\n", "<!-- rates: end -->\n"

_SERIES = (
    ("gate: wrong", "#b3261e"),
    ("gate: inconclusive", "#b8b8b8"),
    ("pytest-benchmark min: wrong", "#3b6ea8"),
    ("pytest-benchmark median: wrong", "#8fb4dc"),
)

_WIDTH, _HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 52, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What the trials at one true speedup ended with."""

    relative: float
    trials: int
    passed: int
    failed: int
    inconclusive: int
    peer_min_wrong: int
    peer_median_wrong: int
    median_ms: int

    @property
    def wrong(self) -> int:
        return self.failed if self.relative >= 1 else self.passed

    def bars(self) -> tuple[float, ...]:
        """Shares in the order of the series."""
        counts = (self.wrong, self.inconclusive, self.peer_min_wrong, self.peer_median_wrong)
        return tuple(count / self.trials for count in counts)


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[Shares]:
    """One entry per true speedup, the largest first."""
    some = [row for row in rows if row["length"] != "50ms" and not row["scenario"].startswith("asym")]
    return [_shares([row for row in some if row["relative"] == each], each) for each in _relatives(some)]


def _relatives(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({row["relative"] for row in rows}, reverse=True)


def _shares(rows: Sequence[Mapping[str, Any]], relative: float) -> Shares:
    total: Counter[str] = Counter()
    spent_ms: Counter[int] = Counter()
    for row in rows:
        names = ("trials", "passed", "failed", "inconclusive", "peer_min_passes", "peer_median_passes")
        total.update({name: row[name] for name in names})
        spent_ms.update({int(value): count for value, count in row["spent_ms"].items()})
    wrong = {
        kind: total["trials"] - total[f"peer_{kind}_passes"] if relative >= 1 else total[f"peer_{kind}_passes"]
        for kind in ("min", "median")
    }
    return Shares(
        relative=relative,
        trials=total["trials"],
        passed=total["passed"],
        failed=total["failed"],
        inconclusive=total["inconclusive"],
        peer_min_wrong=wrong["min"],
        peer_median_wrong=wrong["median"],
        median_ms=sorted(spent_ms.elements())[total["trials"] // 2],
    )


def table(shares: Sequence[Shares]) -> Iterator[str]:
    """Markdown, with counts where a share would hide how few there were."""
    yield "| true / target | trials | passed | failed | inconclusive | median s | peer wrong: min | median |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in shares:
        cells = (
            f"{each.relative:.2f}",
            f"{each.trials:,}",
            _count(each.passed, each.trials),
            _count(each.failed, each.trials),
            _count(each.inconclusive, each.trials),
            f"{each.median_ms / 1000:.2f}",
            _count(each.peer_min_wrong, each.trials),
            _count(each.peer_median_wrong, each.trials),
        )
        yield f"| {' | '.join(cells)} |"


def facts(document: Mapping[str, Any]) -> str:
    """How much was run, and the two counts that matter most."""
    rows = document["cells"]
    counts = sorted({row["trials"] for row in rows})
    known = [row for row in rows if not row["scenario"].startswith("asym") or abs(row["relative"] - 1) > 0.021]
    above = [row for row in known if row["relative"] >= 1.02 and not row["scenario"].startswith("replay-bursts")]
    below = [row for row in known if row["relative"] <= 0.98 and not row["scenario"].startswith("eager-bursts")]
    failed, above_trials = _total(above, "failed"), _total(above, "trials")
    passed, below_trials = _total(below, "passed"), _total(below, "trials")
    return (
        f"{counts[0]:,} (at 20 µs) to {counts[-1]:,} trials in each of {len(rows)} cells, seed {document['seed']}, "
        f"budget {document['budget_seconds']:g} s. The counts below are for all lengths, without bursts on one arm "
        f"alone. At 1.02 and more {failed:,} of {above_trials:,} failed, "
        f"{above_trials - _total(above, 'peer_min_passes'):,} by pytest-benchmark's minimum. At 0.98 and less "
        f"{passed:,} of {below_trials:,} passed, {_total(below, 'peer_min_passes'):,} by its minimum."
    )


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(int(row[name]) for row in rows)


def _count(count: int, trials: int) -> str:
    if count in (0, trials):
        return "0" if count == 0 else "all"
    share = 100 * count / trials
    return f"{share:.2f} % ({count})" if min(share, 100 - share) < 1 else f"{share:.1f} %"


def figure(shares: Sequence[Shares]) -> str:
    """A group of four bars per true speedup."""
    highest = max(max(each.bars()) for each in shares)
    top = max(0.1, -(-highest // 0.1) * 0.1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Wrong verdicts by true speedup">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        *_legend(),
        *_grid(top),
    ]
    step = (_WIDTH - _LEFT - _RIGHT) / len(shares)
    for index, each in enumerate(shares):
        parts += _group(each, _LEFT + index * step, step, top)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">true speedup / target</text>')
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterator[str]:
    x = _LEFT
    for name, colour in _SERIES:
        yield f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="24">{name}</text>'
        x += 40 + 7 * len(name)


def _grid(top: float) -> Iterator[str]:
    for tenth in range(round(top / 0.1) + 1):
        y = _y(tenth * 0.1, top)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>'


def _group(shares: Shares, left: float, step: float, top: float) -> Iterator[str]:
    width = step * 0.19
    for index, (share, (name, colour)) in enumerate(zip(shares.bars(), _SERIES, strict=True)):
        x, y = left + step * 0.12 + index * width, _y(share, top)
        height = _HEIGHT - _BOTTOM - y
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
        yield f"<title>{name}: {share:.2%}</title></rect>"
        if not share:
            yield f'<text x="{x + width / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle" fill="{colour}">0</text>'
    text = f'x="{left + step / 2:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle"'
    yield f"<text {text}>{shares.relative:.2f}</text>"


def _y(share: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - share / top * (_HEIGHT - _TOP - _BOTTOM)


def page_with(page: str, lines: Sequence[str]) -> str:
    """The page with its table replaced; :class:`ValueError` without the two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page has no table between {_BEGIN.strip()} and {_END.strip()}")
    return before + begin + "\n".join(lines) + "\n" + end + after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    document = json.loads(asked.json.read_text(encoding="utf-8"))
    shares = pooled(document["cells"])
    lines = [*table(shares), "", *textwrap.wrap(facts(document), 118)]
    made = {FIGURE: figure(shares), PAGE: page_with(PAGE.read_text(encoding="utf-8"), lines)}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if asked.check:
            print(f"{path.relative_to(ROOT)} is not what {asked.json.name} makes of it")
        else:
            path.write_text(made[path], encoding="utf-8")
    return int(asked.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

"""Make ``docs/gpu.md`` and its figures from ``benchmarks/evidence``; figures need matplotlib, the page does not."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu_evidence import page  # noqa: E402
from benchmarks.gpu_evidence.evidence import ForeignEvidence  # noqa: E402

TARGET_RATIO = 1.15


def main(evidence: Path, docs: Path) -> int:
    try:
        text, runs = page.page(evidence), page.latest_of_each_device(evidence)
    except ForeignEvidence as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return 1
    if runs:
        draw(runs, docs)
    (docs / "gpu.md").write_text(text, encoding="utf-8")
    print(f"{docs / 'gpu.md'}: {len(runs)} devices")
    return 0


def draw(runs: list[dict[str, Any]], folder: Path) -> None:
    """Both figures of the page, the same bytes for the same evidence."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pytest-cudagraph"
    for name, draw_one in zip(page.FIGURES, (_draw_speedup, _draw_attainable), strict=True):
        figure = draw_one(runs)
        figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")


def _axes(runs: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2 * len(runs)))
    axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for each, run in zip(axes, runs, strict=True):
        each.set_title(f"{run['device']['name']}, torch {run['device']['torch']}")
        each.grid(alpha=0.3)
    return figure, list(axes)


def _draw_speedup(runs: list[dict[str, Any]]) -> Any:
    figure, axes = _axes(runs)
    for each, run in zip(axes, runs, strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for (model, size), cell in sorted(page.cells_of(run).items()):
            if cell["speedup"] is not None:
                lines[model].append((size, cell["speedup"]["estimate"]))
        for model, points in lines.items():
            each.plot(*zip(*points, strict=True), marker="o", label=model)
        each.axhline(TARGET_RATIO, color="black", linestyle="--", linewidth=1, label="15 % faster")
        each.set(xscale="log", xlabel="batch size", ylabel="speedup of replay over eager")
        sizes = sorted({size for points in lines.values() for size, _ in points})
        each.set_xticks(sizes, [str(size) for size in sizes])
        each.minorticks_off()
        each.legend(fontsize="small")
    return figure


def _draw_attainable(runs: list[dict[str, Any]]) -> Any:
    figure, axes = _axes(runs)
    for each, run in zip(axes, runs, strict=True):
        points = page.attainable(run)
        for model in dict.fromkeys(model for model, *_ in points):
            own = [(limit, realised) for name, _, realised, limit in points if name == model]
            each.scatter(*zip(*own, strict=True), label=model, s=18)
        top = max((limit for *_, limit in points), default=2.0)
        each.plot([1, top], [1, top], color="black", linewidth=1)
        each.set(xscale="log", yscale="log", xlabel="attainable speedup", ylabel="realised speedup")
        for axis in (each.xaxis, each.yaxis):
            axis.set_major_formatter("{x:g}x")
            axis.set_minor_formatter("{x:g}x")
        if points:
            each.legend(fontsize="small")
    return figure


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evidence", type=Path, default=ROOT / "benchmarks" / "evidence", help="the folder to read")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder to write to")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    sys.exit(main(given.evidence, given.docs))

"""What would have to be asked for in place of what is: one line per gate, for all batch sizes of a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_cudagraph.values import GateName, GraphReport, Judgement, MinSource, Verdict


def acceptances(report: GraphReport, missed: Sequence[Judgement]) -> list[str]:
    """``to accept: @pytest.mark.graph_speedup(min={1: 1.85, 8: 1.20})``, and the like for kernels and another revision.

    One line per setting, since a second marker for the same key would not be heard. A gate that some batch size cannot
    pass by any setting has none.
    """
    lines = [_speedup_line(report)] if any(each.gate == "speedup" for each in missed) else []
    kernels = _largest(missed, "structure")
    if kernels is not None:
        marker = f"@pytest.mark.graph_speedup(max_new_kernels={kernels:g})"
        lines.append(f"to accept: {marker}, or {report.update_option}")
    slowdown = _largest(missed, "base")
    if slowdown is not None:
        lines.append(f"to accept: --cudagraph-base-slowdown={slowdown:.2f}")
    return [line for line in lines if line]


def _largest(missed: Iterable[Judgement], gate: GateName) -> float | None:
    return max((each.accept for each in missed if each.gate == gate and each.accept is not None), default=None)


def _speedup_line(report: GraphReport) -> str:
    """Every batch size is in it: one that is left out of a mapping would no longer be measured."""
    least: dict[int, float] = {}
    accepted: list[float] = []
    for batch in report.batches:
        judgement = next((each for each in batch.judgements if each.gate == "speedup"), None)
        accept = judgement.accept if judgement else None
        if judgement is not None and judgement.verdict is Verdict.FAILED and accept is None:
            return ""
        accepted += [] if accept is None else [accept]
        value = batch.min_speedup if accept is None else accept
        least |= {} if value is None else {batch.batch_size: value}
    return f"to accept: {min_line(least, report.min_source)}" if accepted else ""


def min_line(least: Mapping[int, float], source: MinSource) -> str:
    """What to write, and where, for these least speedups to be asked for: where ``source`` says that it is decided."""
    argument = _min_text(least, source)
    if source.place == "argument":
        return f"min_speedup={argument} in the call: its argument overrides markers"
    marker = f"@pytest.mark.graph_speedup(min={argument})"
    return f"{marker} in place of the marker that asks for more" if source.place == "marker" else marker


def _min_text(least: Mapping[int, float], source: MinSource) -> str:
    values = {size: _number_text(value) for size, value in sorted(least.items())}
    if len(set(values.values())) == 1 and not source.is_mapping:
        return next(iter(values.values()))
    return f"{{{', '.join(f'{size}: {value}' for size, value in values.items())}}}"


def _number_text(value: float) -> str:
    """Two decimals, and more only where the value has them: what was asked for is not to be made stricter."""
    text = f"{value:.2f}"
    return text if abs(float(text) - value) < 1e-9 else f"{value:g}"

"""What a document says of a run is all that its readers need: written and read back, a run is the same run."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from tests.facts import (
    CPU,
    H200,
    batch,
    generation,
    guided,
    judgement,
    latency,
    lookup,
    modes,
    prefill,
    report,
    saved,
    sessions,
    timing,
    with_figures,
)
from tests.unit.report.test_page import added

from pytest_cudagraph import record
from pytest_cudagraph.base_revision.judge import base_tables
from pytest_cudagraph.report import (
    WorkloadTest,
    cells_of,
    document,
    json_text,
    page,
    ranking_tables,
    run_of_document,
    run_tables,
    step_summary,
    table,
    text_of,
)
from pytest_cudagraph.values import (
    Agreement,
    BaseComparison,
    Finding,
    Interval,
    Receipt,
    Site,
    UndecidedState,
    Verdict,
    stored,
)


def nanoseconds(draw):
    """A latency as a clock gives it: at most a picosecond is below it."""
    return round(10 ** draw.uniform(2, 9), draw.choice((0, 1, 3)))


def drawn_latency(draw):
    return replace(latency(1.0), samples=draw.randrange(1, 10**6), **dict(zip(
        ("minimum_ns", "q25_ns", "median_ns", "q75_ns", "q90_ns"), sorted(nanoseconds(draw) for _ in range(5)),
        strict=True,
    )))  # fmt: skip


def drawn_timing(draw):
    compiled = draw.choice((None, drawn_latency(draw)))
    low, estimate, high = sorted(draw.uniform(0.1, 9.0) for _ in range(3))
    return replace(
        timing(), eager=drawn_latency(draw), replay=drawn_latency(draw), compiled=compiled,
        medians=replace(timing().medians, eager_ns=nanoseconds(draw), replay_ns=nanoseconds(draw),
                        compiled_ns=compiled and nanoseconds(draw)),
        speedup=Interval(estimate=estimate, low=draw.choice((0.0, low)), high=draw.choice((math.inf, high))),
        decision=draw.choice(("pass", "fail", "open")), noise_ratio=draw.choice((math.inf, draw.random())),
        reference=draw.choice((None, drawn_latency(draw))), busy_ns=draw.choice((None, nanoseconds(draw))),
        discarded=draw.randrange(3), disturbance=draw.choice(("", "shared")), notes=draw.choice(((), ("quiet",))),
        weighed=draw.choice((None, UndecidedState(quiet=3, least_blocks=9, elapsed_ns=12.5, least_ns=3e9))),
        measure_ns=draw.randrange(10**10), seed=draw.randrange(2**31),
        drift_ratio=draw.choice((math.inf, draw.uniform(0.5, 2.0))),
    )  # fmt: skip


def drawn_judgement(draw):
    gate = draw.choice(("check", "speedup", "baseline", "structure", "base"))
    verdict = draw.choice([each for each in Verdict if each is not Verdict.NOT_CAPTURED])
    return judgement(verdict, gate=gate, reason=f"{gate} \N{GREEK SMALL LETTER MU} {draw.random()}",
                     evidence=draw.choice(((), ("one", "two\nlines"))), remedy=draw.choice(("", "fix")),
                     accept=draw.choice((None, draw.random())), hazard=draw.choice(("", "rng")))  # fmt: skip


def drawn_base(draw):
    levels = {name: tuple(nanoseconds(draw) for _ in range(5)) for name in ("base_replay_ns", "head_replay_ns")}
    change = Interval(estimate=draw.uniform(0.5, 2.0), low=0.4, high=2.5)
    return BaseComparison(revision="HEAD~1 (a1b2c3d)", **levels, base_kernels=46, head_kernels=62, change=change)


def drawn_baseline(draw):
    medians = [round(draw.uniform(50.0, 90.0), 3) for _ in range(draw.randrange(1, 6))]
    past = [replace(each, q25_ns=round(each.q25_ns, 3), median_ns=round(each.median_ns, 3))
            for each in sessions(*medians, reference_us=draw.choice((None, 100.0)))]  # fmt: skip
    entry = saved(NAME, replay=drawn_latency(draw), device=draw.choice((H200, CPU)))
    entry = replace(entry, sessions=tuple(past))
    return draw.choice((entry, with_figures(entry, ttft=900.0, itl=61.5)))


NAME = "tests/test_a.py::test_a"


def drawn_batch(draw, size):
    missed = draw.choice(((), (judgement(Verdict.NOT_CAPTURED, gate="capture", reason="refused"),)))
    scenario = draw.choice((None, generation(), prefill(), lookup(), guided(), modes()))
    facts = {
        "timing": None if missed else draw.choice((None, drawn_timing(draw))),
        "receipt": draw.choice((None, Receipt(
            batch_size=size, operations=9, kernels=5, kernel_names={"aten.mul": 5}, capture_ns=draw.randrange(10**9),
            memory_bytes=draw.randrange(2**40), replays=7, fallbacks=draw.choice(((), ("eager",))),
        ))),
        "agreement": draw.choice((None, Agreement(
            batch_size=size, replays=4, leaves=1, state_tensors=2, bit_exact=True, eager_repeatable=False,
            warnings=("all outputs are zero",), not_compared=("Cache",),
        ))),
        "baseline": draw.choice((None, replace(drawn_baseline(draw), batch_size=size))),
        "comparison": draw.choice(("same", "slower", "new", "off")),
        "base": draw.choice((None, drawn_base(draw))),
        "compile_ns": draw.choice((None, draw.randrange(10**12))),
        "figures": draw.choice(({}, {"decode": drawn_latency(draw)})),
        "scenario": None if scenario is None else stored(scenario, NAME),
        "min_speedup": draw.choice((None, 1.15)),
    }  # fmt: skip
    return batch(size, *missed, *(drawn_judgement(draw) for _ in range(draw.randrange(4))), **facts)


def drawn_report(draw):
    site = Site(file="/work/model.py", line=12, function="forward")
    finding = Finding(id="rng", level=draw.choice(("error", "warning", "note")), message="m", fix="f", evidence="e",
                      site=draw.choice((None, site)), called_from=draw.choice((None, site)),
                      loud=draw.choice((True, False)), accepted=draw.choice(("", "seeded")))  # fmt: skip
    sizes = sorted(draw.sample((1, 2, 4, 8, 96), draw.randrange(4)))
    return report(
        NAME, device=draw.choice((None, H200, CPU)), batches=tuple(drawn_batch(draw, size) for size in sizes),
        findings=(finding,), judgements=(drawn_judgement(draw),), compile_ns=draw.choice((None, 7 * 10**9)),
        not_judged=("mylib::op",), notes=("training mode",), gpu=draw.choice(("", "GPU-1a2b")),
        compile_mode=draw.choice(("none", "inductor")), nodeid=draw.choice((NAME, "b.py::test_b")),
    )  # fmt: skip


def as_documents_have_it(batch):
    """No timing of a wrong graph, and lists where the result of a scenario had tuples."""
    scenario = batch.scenario
    if scenario is not None:
        scenario = replace(scenario, stored_document=json.loads(json.dumps(scenario.stored_document)))
    is_timed = batch.verdict not in (Verdict.WRONG, Verdict.NOT_CAPTURED)
    return replace(batch, scenario=scenario, timing=batch.timing if is_timed else None)


def read_back(reports, workloads=(), **rest):
    return run_of_document(json.loads(json_text(document(reports, H200, {"rootdir": "/work"}, (), workloads, **rest))))


@pytest.mark.parametrize("seed", range(40))
def test_a_report_that_was_written_is_read_as_it_was(seed):
    draw = random.Random(seed)
    written = [drawn_report(draw) for _ in range(3)]
    run = read_back(written)
    for before, after in zip(written, run.reports, strict=True):
        assert replace(after, batches=()) == replace(before, batches=())
        assert after.batches == tuple(map(as_documents_have_it, before.batches))
    again = document(run.reports, H200, {"rootdir": "/work"})
    assert json_text(again) == json_text(document(written, H200, {"rootdir": "/work"}))


@pytest.mark.parametrize("seed", range(40, 50))
def test_each_reader_says_the_same_of_a_run_and_of_its_document(seed):
    draw = random.Random(seed)
    written = [drawn_report(draw) for _ in range(4)]
    workloads = [WorkloadTest(nodeid=each.nodeid, group="g", name=each.nodeid) for each in written]
    run = read_back(written, workloads)

    assert table(run.reports) == table(written)
    assert run_tables(run.reports, base_tables(run.reports), (), run.workloads) == run_tables(
        written, base_tables(written), (), workloads
    )
    assert cells_of(run.reports, run.workloads) == cells_of(written, workloads)
    assert entries(run.reports) == entries(written)
    assert page(run) == page(replace(run, reports=tuple(written)))


def entries(reports):
    """What ``compare`` reads."""
    timed = [(each, batch) for each in reports for batch in each.batches if batch.valid_timing and each.device]
    return [record.saved_batch(*each, saved_at="2026-11-22") for each in timed]


def text_of_cells(text):
    return " ".join(text.split())


def test_terminal_step_summary_and_page_have_the_same_cells_for_each_table():
    base = BaseComparison(
        revision="main (1a2b3c4)", base_replay_ns=(60e3,) * 5, head_replay_ns=(66e3,) * 5,
        change=Interval(estimate=1.1, low=1.08, high=1.12),
    )  # fmt: skip
    scenarios = (generation(), prefill(), lookup(), guided(), modes())
    batches = [batch(size, base=base, scenario=each) for size, each in enumerate(scenarios, start=1)]
    reports = [report("test_a.py::t", *batches)]
    workloads = [WorkloadTest(nodeid="test_a.py::t", group="heads", name="mlp")]
    tables = run_tables(reports, base_tables(reports), [added("test_a.py::t")], workloads, {"rootdir": "/work"})
    run = read_back(reports, workloads, tables=tables)
    assert list(run.tables) == tables
    assert {"warnings and notes", "not judged"}.isdisjoint(each.title for each in tables)
    assert [each.title for each in tables if not each.in_terminal] == ["monitored calls", "settings"]

    below = [line for each in tables if each.in_terminal for line in text_of(each)]
    terminal = text_of_cells("\n".join([*table(reports), *below]))
    summary = step_summary(reports, below, room_bytes=1 << 20, is_strict=False)
    shown = page(run)
    for each in tables:
        for row in each.rows:
            line = text_of_cells(" ".join(row))
            assert not each.in_terminal or line in terminal
            assert not each.in_terminal or line in text_of_cells(summary.replace("&gt;", ">"))
            assert all(f">{cell}<" in shown.replace("&gt;", ">") for cell in row)


def test_ranking_tables_are_those_of_the_command():
    reports = [report("a.py::test_a", batch(8))]
    workloads = [WorkloadTest(nodeid="a.py::test_a", group="heads", name="mlp")]
    tables = run_tables(reports, workloads=workloads)
    run = read_back(reports, workloads, tables=tables)
    assert [each for each in run.tables if each.title == "workloads: heads"] == ranking_tables(
        run.reports, run.workloads
    )

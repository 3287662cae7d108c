"""The benchmark of the gate's error rates: its sources, its tallies, its limits, and the example in the docs."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("numpy", reason="the benchmarks need numpy")
pytest.importorskip("scipy", reason="the benchmarks need scipy")

import numpy as np
from benchmarks import aa_runs, error_rates_figure, gate_error_rates
from benchmarks.error_rates import cells, limits, store, table, trial
from benchmarks.error_rates.cells import Cell, Tally
from benchmarks.error_rates.noise import KINDS
from benchmarks.error_rates.scenarios import CALL_NS, all_scenarios, load_trace

from pytest_cudagraph.values import Verdict

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = {scenario.name: scenario for scenario in all_scenarios()}


def tally_of(**counts: int) -> Tally:
    """``failed=3, passed=97``: trials of 0.2 s."""
    tally = Tally()
    for word, count in counts.items():
        found = trial.Found(
            verdict=Verdict(word), calls=100, spent_ns=0.2e9, peer_min_passes=True, peer_median_passes=False
        )
        for _ in range(count):
            tally.add(found)
    return tally


# --- sources ---------------------------------------------------------------------------------------------------------


def test_every_length_and_every_noise_is_there():
    assert {scenario.length for scenario in SCENARIOS.values()} == set(CALL_NS)
    assert sum(scenario.kind is None for scenario in SCENARIOS.values()) == 14
    kinds = {name.rsplit("_", 1)[0] for name, scenario in SCENARIOS.items() if scenario.kind is not None}
    assert kinds == set(KINDS)
    assert all(f"{kind}_{length}" in SCENARIOS for kind in KINDS for length in ("200us", "2ms"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_machine_has_the_true_ratio_that_was_asked_for(name):
    scenario = SCENARIOS[name]
    if name.startswith("cold-start"):
        machine = scenario.machine(1.3, np.random.default_rng(1))
        eager, replay = list(islice(machine.eager, 4000))[200:], list(islice(machine.replay, 4000))[200:]
        slots = [(e[0], r[1]) for e, r in zip(eager, replay, strict=True)]
    else:
        slots = list(islice(scenario.machine(1.3, np.random.default_rng(1)).eager, 40_000))
    # What falls on one arm alone, by chance or by design, cancels in the median only.
    margin_ratio = 0.03 if name.startswith(("asym", "ar1")) else 0.003
    ratio = statistics.median(eager / replay for eager, replay in slots)
    if name.startswith(("mm", "asym")):
        ratio = statistics.median(slot[0] for slot in slots) / statistics.median(slot[1] for slot in slots)
    assert ratio == pytest.approx(1.3, rel=margin_ratio)


def test_a_traces_own_length_is_kept():
    assert np.median(load_trace("py_20_AA_same")) == pytest.approx(17e3, rel=0.1)
    assert np.median(load_trace("py_2000_AA_quiet")) == pytest.approx(2e6, rel=0.1)


def test_bursts_last_and_come_as_often_as_is_said():
    slots = list(islice(SCENARIOS["eager-bursts_2ms"].machine(1.15, np.random.default_rng(3)).eager, 100_000))
    busy = [eager / replay > 1.35 for eager, replay in slots]
    begun = sum(now and not before for before, now in pairwise(busy))
    spent_ns = sum((eager + replay) / 2 for eager, replay in slots)
    busy_ns = sum((eager + replay) / 2 for (eager, replay), is_busy in zip(slots, busy, strict=True) if is_busy)
    assert busy_ns / spent_ns == pytest.approx(0.3, abs=0.03)
    assert busy_ns / begun == pytest.approx(60e6, rel=0.1)


def test_noise_that_is_correlated_is_so_from_block_to_block():
    slots = list(islice(SCENARIOS["ar1_2ms"].machine(1.15, np.random.default_rng(4)).eager, 40_000))
    logs = np.log([eager / replay / 1.15 for eager, replay in slots]).reshape(-1, 4).mean(axis=1)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(0.5, abs=0.05)
    assert logs.std() == pytest.approx(0.02, rel=0.1)


def test_a_coarse_clock_reads_in_steps():
    machine = SCENARIOS["coarse-clock_20us"].machine(1.15, np.random.default_rng(1))
    machine.arms().eager()
    assert machine.clock.resolution_ns == 500
    assert machine.clock.now_ns() % 500 == 0
    assert 0 <= machine.clock.time_ns - machine.clock.now_ns() < 500


# --- trials ----------------------------------------------------------------------------------------------------------


def test_the_shipped_gate_is_what_runs(monkeypatch):
    asked = []

    class Spy(trial.EvidenceRule):
        def __init__(self, target_ratio):
            asked.append(target_ratio)
            super().__init__(target_ratio)

    monkeypatch.setattr(trial, "EvidenceRule", Spy)
    found = trial.run_trial(SCENARIOS["mm_2000_AB_quiet"], 1.10, 0, seed=1, budget_ns=10e9)
    assert asked == [trial.THRESHOLD_RATIO]
    assert found.verdict is Verdict.PASSED
    assert 0.2e9 < found.spent_ns < 1e9
    assert (found.peer_min_passes, found.peer_median_passes) == (True, True)


@pytest.mark.parametrize("name", ["mm_2000_AB_quiet", "mm_2000_AA_oversub", "bursts_2ms", "two-modes_2ms", "ar1_2ms"])
@pytest.mark.parametrize(("relative", "verdict"), [(1.10, Verdict.PASSED), (0.90, Verdict.FAILED)])
def test_ten_percent_is_told_right(name, relative, verdict):
    found = [trial.run_trial(SCENARIOS[name], relative, n, seed=1, budget_ns=10e9) for n in range(5)]
    assert [f.verdict for f in found] == [verdict] * 5


def test_the_same_numbers_give_the_same_trial_whatever_the_jobs():
    some = [cell for cell in cells.all_cells("bursts_50ms") if cell.relative in (1.10, 0.90)]

    def run(*trials):
        tallies = {}
        for upto in trials:
            cells.run_cells(some, tallies, trials=upto, seed=7, budget_ns=10e9, jobs=1, passed=lambda: None)
        return tallies

    assert run(3) == run(1, 3)
    assert {name: tally.trials for name, tally in run(2).items()} == {cell.name: 2 for cell in some}


def test_an_interrupted_run_goes_on_from_its_file(tmp_path):
    some = [cell for cell in cells.all_cells("bursts_2ms") if cell.relative == 1.10]
    tallies = {}
    cells.run_cells(some, tallies, trials=2, seed=7, budget_ns=10e9, jobs=1, passed=lambda: None)
    facts, path = store.head(7, 10.0), tmp_path / "rates.json"
    assert store.resumed(path, some, facts) == {}
    store.write(path, some, tallies, facts)
    assert store.resumed(path, some, facts) == tallies


@pytest.mark.parametrize("changed", [{"seed": 8}, {"budget_seconds": 5.0}, {"source": "0"}], ids=str)
def test_another_run_is_not_gone_on_with(tmp_path, changed):
    facts, path = store.head(7, 10.0), tmp_path / "rates.json"
    store.write(path, [], {}, facts)
    with pytest.raises(store.OtherRun, match=f"cannot be continued: its {next(iter(changed))} is "):
        store.resumed(path, [], facts | changed)


def test_the_shortest_calls_get_a_fifth_of_the_trials():
    shortest = Cell(scenario=SCENARIOS["py_20_AA_same"], relative=1.0)
    assert [cells.wanted(shortest, trials) for trials in (1, 20, 2000)] == [1, 4, 400]
    assert cells.wanted(Cell(scenario=SCENARIOS["bursts_2ms"], relative=1.0), 20) == 20


@pytest.mark.parametrize(("fraction", "value"), [(0.5, 5), (0.51, 10), (0.95, 20), (1.0, 20)])
def test_quantiles_of_counts(fraction, value):
    assert cells.quantile_of({20: 1, 5: 5, 10: 4}, fraction) == value


@pytest.mark.parametrize(("spent_ms", "step"), [(0.1, 5), (300.0, 300), (300.1, 305), (1000.0, 1000), (1000.1, 1050)])
def test_times_are_rounded_up(spent_ms, step):
    assert cells._step_ms(spent_ms) == step


def test_the_peers_time_is_the_gates():
    machine = SCENARIOS["two-modes_200us"].machine(1.15, np.random.default_rng(1))
    stats = trial._peer_arm(machine, 1, 0.1e9)
    assert stats.min == pytest.approx(200e3, rel=0.2)
    # Rounds follow from one calibrating call, which may be a slow one.
    assert 0.06e9 < stats.total < 0.15e9


# --- limits ----------------------------------------------------------------------------------------------------------


def broken(name: str, relative: float, **counts: int) -> list[str]:
    cell = Cell(scenario=SCENARIOS[name], relative=relative)
    return list(limits.broken_limits([cell], {cell.name: tally_of(**counts)}))


def test_what_chance_explains_breaks_no_limit():
    assert broken("bursts_2ms", 1.05, passed=29, failed=0, inconclusive=1) == []
    # A single one of thirty: the exact lower bound is 0.03 %.
    assert limits.lower_bound(1, 30) == pytest.approx(1 - 0.99 ** (1 / 30))
    assert broken("bursts_2ms", 1.05, passed=29, failed=1) == []


def test_a_limit_says_what_it_found_and_what_is_allowed():
    first, second = broken("bursts_2ms", 1.05, passed=27, failed=3)
    assert first == "bursts_2ms at 1.05: false failures: 3 of 30 (10.0%, at least 1.49%); allowed 0.1%"
    assert second.startswith("formula 2ms, all at 1.05: false failures: 3 of 30")


@pytest.mark.parametrize(
    ("relative", "counts", "is_broken"),
    [
        (1.02, {"passed": 1998, "failed": 2}, False),
        (1.02, {"passed": 1997, "failed": 3}, True),
        (1.00, {"inconclusive": 1980, "failed": 20}, False),
        (1.00, {"inconclusive": 1979, "failed": 21}, True),
        (0.98, {"failed": 1980, "passed": 20}, False),
        (0.98, {"failed": 1979, "passed": 21}, True),
        (0.99, {"passed": 2000}, False),
        (0.95, {"failed": 1900, "inconclusive": 100}, False),
        (0.95, {"failed": 1899, "inconclusive": 101}, True),
    ],
)
def test_in_a_full_run_the_share_itself_counts(relative, counts, is_broken):
    assert bool(broken("bursts_2ms", relative, **counts)) is is_broken


def test_short_calls_must_decide_more_often():
    counts = {"failed": 1940, "inconclusive": 60}
    assert broken("bursts_200us", 0.95, **counts)
    assert not broken("bursts_2ms", 0.95, **counts)


def test_a_verdict_that_comes_too_late_breaks_a_limit():
    cell = Cell(scenario=SCENARIOS["bursts_200us"], relative=1.05)
    slow = tally_of(passed=30)
    slow.spent_ms = Counter({310: 20, 200: 10})
    assert not list(limits.broken_limits([cell], {cell.name: slow}))
    slow.spent_ms = Counter({310: 27, 200: 3})
    assert "0.3 s" in next(limits.broken_limits([cell], {cell.name: slow}))


def test_bursts_on_eager_must_not_pass_a_slow_graph():
    assert broken("eager-bursts_2ms", 0.98, passed=30)
    assert broken("eager-bursts_2ms", 0.99, passed=30) == []


def test_bursts_on_replay_must_not_fail_a_fast_graph():
    text = broken("replay-bursts_2ms", 1.05, failed=3, passed=1997)[0]
    assert text.startswith("replay-bursts_2ms at 1.05: false failures: 3 of 2000")
    assert broken("replay-bursts_2ms", 1.05, failed=2, passed=1998) == []


def test_a_ratio_that_is_not_known_is_not_judged():
    assert broken("asym_200_AB_quiet", 1.00, failed=30) == []
    assert broken("asym_200_AB_quiet", 1.02, failed=30) == []
    assert broken("asym_200_AB_quiet", 1.05, failed=30)


def run_command(monkeypatch, cell, tally, cost_ns):
    monkeypatch.setattr(gate_error_rates, "all_cells", lambda pattern: [cell])
    monkeypatch.setattr(
        gate_error_rates, "run_cells", lambda some, tallies, **options: tallies.update({cell.name: tally})
    )
    monkeypatch.setattr(gate_error_rates, "decision_ns", lambda: cost_ns)
    return gate_error_rates.main([])


def test_a_verdict_that_comes_too_late_is_an_error(monkeypatch, capsys):
    cell = Cell(scenario=SCENARIOS["eager-bursts_2ms"], relative=0.95)
    slow = tally_of(failed=30)
    slow.spent_ms = Counter({700: 30})
    assert run_command(monkeypatch, cell, slow, 3e3) == 1
    assert "BROKEN eager-bursts_2ms at 0.95: median time to the verdict above 0.6 s" in capsys.readouterr().out


def test_kept_limits_are_no_error(monkeypatch, capsys):
    cell = Cell(scenario=SCENARIOS["bursts_2ms"], relative=1.10)
    assert run_command(monkeypatch, cell, tally_of(passed=30), 3e3) == 0
    assert capsys.readouterr().out.endswith("all limits kept\n")


def test_a_broken_limit_is_an_error(monkeypatch, capsys):
    cell = Cell(scenario=SCENARIOS["bursts_2ms"], relative=1.10)
    assert run_command(monkeypatch, cell, tally_of(failed=30), 9e3) == 1
    out = capsys.readouterr().out
    assert "BROKEN a decision costs 9.0 µs per block; allowed 5 µs" in out
    assert out.endswith("3 limits broken\n")


def test_the_whole_command_runs(capsys, monkeypatch):
    monkeypatch.setattr(gate_error_rates, "decision_ns", partial(gate_error_rates.decision_ns, repeats=30))
    assert gate_error_rates.main(["--trials", "1", "--jobs", "1", "--only", "bursts_50ms"]) in (0, 1)
    out = capsys.readouterr().out
    assert out.startswith("1 trials in each of 18 cells, seed 1, budget 10 s\n| group (scenarios) |")
    assert re.search(r"a decision costs \d+\.\d µs per block", out)


def test_a_row_tells_all_of_its_group():
    some = [Cell(scenario=SCENARIOS[name], relative=0.95) for name in ("bursts_2ms", "two-modes_2ms")]
    tallies = {some[0].name: tally_of(failed=9, passed=1), some[1].name: tally_of(failed=8, inconclusive=2)}
    *_, row = table.table(some, tallies)
    assert row == (
        "| formula 2ms (2) | 0.95 | 20 | 5.00 % | 85.00 % | 10.00 % (20 %) | 100 | 200 / 200 | 100.00 % / 0 |"
    )


# --- the figure ------------------------------------------------------------------------------------------------------


def rows_of(relative, length="2ms", scenario="bursts_2ms", **counts):
    row = dict.fromkeys(("passed", "failed", "inconclusive", "peer_min_passes", "peer_median_passes"), 0) | counts
    row["trials"] = row["passed"] + row["failed"] + row["inconclusive"]
    return {"scenario": scenario, "length": length, "relative": relative, "spent_ms": {"300": row["trials"]}, **row}


def test_the_docs_table_counts_what_is_rare_and_pools_what_is_known():
    rows = [
        rows_of(1.05, passed=995, failed=3, inconclusive=2, peer_min_passes=900, peer_median_passes=1000),
        rows_of(0.95, failed=500, peer_min_passes=50),
        rows_of(0.95, failed=500, scenario="two-modes_2ms"),
        rows_of(0.95, passed=500, length="50ms"),
        rows_of(0.95, passed=500, scenario="asym_200_AB_quiet", length="200us"),
    ]
    _, _, *lines = error_rates_figure.table(error_rates_figure.pooled(rows))
    assert lines == [
        "| 1.05 | 1,000 | 99.50 % (995) | 0.30 % (3) | 0.20 % (2) | 0.30 | 10.0 % | 0 |",
        "| 0.95 | 1,000 | 0 | all | 0 | 0.30 | 5.0 % | 0 |",
    ]


def test_the_figure_is_an_image_with_a_bar_per_share():
    shares = error_rates_figure.pooled([rows_of(1.05, passed=50, failed=50), rows_of(0.95, failed=100)])
    root = ElementTree.fromstring(error_rates_figure.figure(shares))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "gate: wrong: 50.00%"
    assert len(titles) == 8


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="no table between"):
        error_rates_figure.page_with("nothing", [])


def test_the_docs_show_the_figures_of_the_file():
    assert error_rates_figure.main(["--check"]) == 0


# --- the same work in both arms --------------------------------------------------------------------------------------


def run_of(target, verdict, estimate=1.0):
    return aa_runs.Run(target=target, call_ns=2e6, verdict=Verdict(verdict), estimate=estimate, seconds=0.3)


def test_runs_of_the_same_work_are_counted_by_target():
    runs = [run_of(1.00, "passed"), run_of(0.95, "passed", 0.99), run_of(1.05, "failed"), run_of(1.05, "passed")]
    assert list(aa_runs.summary(runs)) == [
        "target 1.00: 1 passed, 0 failed, 0 inconclusive of 1; median 0.30 s; farthest estimate 1.000",
        "target 0.95: 1 passed, 0 failed, 0 inconclusive of 1; median 0.30 s; farthest estimate 0.990",
        "target 1.05: 1 passed, 1 failed, 0 inconclusive of 2; median 0.30 s; farthest estimate 1.000",
        "false failures: 0 of 2 (95 %: below 77.6%); false passes: 1 of 2",
    ]


@pytest.mark.parametrize(
    ("target", "verdict", "exit_code"), [(1.0, "failed", 1), (1.0, "passed", 0), (1.05, "failed", 0)]
)
def test_a_single_false_failure_is_an_error(monkeypatch, capsys, target, verdict, exit_code):
    monkeypatch.setattr(aa_runs, "work_of", lambda call_ns: None)
    monkeypatch.setattr(aa_runs, "one_run", lambda *args, **options: run_of(target, verdict))
    assert aa_runs.main(["--runs", "2"]) == exit_code
    assert capsys.readouterr().out.startswith("2 runs of the same work in both arms, as it is")


def test_one_run_is_a_measurement_by_the_product():
    run = aa_runs.one_run(lambda: sum(range(300)), 0.5, 2e4, budget_s=60, seed=1)
    assert run.verdict is Verdict.PASSED
    assert 0 < run.seconds < 60


# --- the docs --------------------------------------------------------------------------------------------------------


def test_the_example_in_the_docs_runs(capsys):
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(example.splitlines()) <= 30
    exec(compile(example, "docs/statistics.md", "exec"), {})
    assert capsys.readouterr().out.startswith("passed replay is 1.20x eager")

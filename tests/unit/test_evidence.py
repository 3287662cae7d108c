"""The evidence of GPUs: the page made of it, its age, and that no rehearsal passes for one."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy", reason="the benchmarks need numpy")

import torch
from benchmarks import capture_rules, evidence_age, gpu_page
from benchmarks.gpu_evidence import arms, cells, evidence, extras, loop, page, rules, schedule, tree
from benchmarks.gpu_evidence.arms import NotAvailable
from benchmarks.models.definitions import Scale

from pytest_cudagraph.backends import open_backend

ROOT = Path(__file__).resolve().parents[2]

QUANTILES = {"samples": 400, "minimum_ns": 95e3, "q25_ns": 98e3, "median_ns": 100e3, "q75_ns": 102e3, "q90_ns": 110e3}
REPLAY = {name: value / 2 for name, value in QUANTILES.items()} | {
    "samples": 400,
    "largest_difference": 0.0,
    "capture_seconds": 0.01,
    "memory_bytes": 2 * 2**20,
    "kernels": 9,
    "compile_seconds": None,
}
CELL = {
    "model": "encoder",
    "batch_size": 8,
    "dtype": "bfloat16",
    "parameters": 1000,
    "arms": {"eager": {**QUANTILES, "largest_difference": 0.0}, "replay": REPLAY},
    "speedup": {"estimate": 2.0, "low": 1.98, "high": 2.02, "noise_ratio": 0.01, "blocks": 30},
    "check": "agrees",
    "keeps_state": False,
    "measure_seconds": 1.2,
    "seconds": 3.0,
}
RUN = {
    "schema": 1,
    "rehearsal": False,
    "began_at": "2026-11-21T09:00:00+00:00",
    "ended_at": "2026-11-21T09:07:00+00:00",
    "seconds": 420.0,
    "limit_seconds": 470.0,
    "source": {"tree": "1a2b3c4d5e6f", "dirty": False},
    "device": {
        "kind": "cuda",
        "name": "NVIDIA H200",
        "driver": "580.159",
        "cuda": "13.0",
        "torch": "2.11.0",
        "python": "3.12.3",
        "host_cpu": "Some CPU",
        "platform": "Linux",
        "threads": 16,
    },
    "versions": {},
    "clocks": [{"slowdowns": [], "is_shared": False}],
    "notes": [],
    "cells": [CELL],
    "overhead": {"difference_ns": {"q25": 900.0, "median": 1200.0, "q75": 1500.0}},
    "monitor": {
        "reading": {"median_ns": 1.1e6},
        "replay": {"median_ns": 50e3},
        "replay_after_reading": {"median_ns": 52e3},
    },
    "verdicts": [
        {
            "model": "encoder",
            "batch_size": 1,
            "decision": "pass",
            "target_ratio": 1.15,
            "seconds": 0.3,
            "noise_ratio": 0.01,
        }
    ],
    "false_alarms": {
        "decisions": {"pass": 198, "fail": 0, "open": 2},
        "runs": 200,
        "discarded": 40,
        "median_seconds": 0.26,
        "q90_seconds": 0.4,
    },
    "kernel_time": [
        {
            "model": "encoder",
            "batch_size": 8,
            "eager": {"busy_ns": 41e3, "works": 9},
            "replay": {"busy_ns": 40e3, "works": 9},
        }
    ],
    "traces": [],
    "left_out": ["vit at batch 96 (3 arms): expected 4 s, 2 s left"],
    "failures": [],
}


EXPECTED = "# torch 2.13.0, on an emulated device\nitem: refused, error 900\nmask: captured\nonly there: captured\n"
FOUND = "# torch 2.11.0, on NVIDIA H200\nitem: refused, error 900\nmask: refused, a | b\n"


@pytest.fixture
def written(tmp_path):
    """Write runs as evidence files, each a change of the one above."""

    def write(*changes):
        for number, change in enumerate(changes):
            evidence.write(tmp_path / "nvidia-h200" / f"{number}.json", {**copy.deepcopy(RUN), **change})
        return tmp_path

    return write


# The page


def test_the_page_in_the_docs_is_the_one_the_script_makes():
    made = page.page(ROOT / "benchmarks" / "evidence")
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == made, "run python benchmarks/gpu_page.py"


def test_without_evidence_the_page_says_that_no_gpu_has_run_it(tmp_path):
    assert "No GPU has run this code yet" in page.page(tmp_path)


def test_a_page_of_one_run(written, golden):
    failed = {"reason": "RuntimeError: accessing tensor output of CUDAGraphs"}
    more = {**CELL, "batch_size": 1, "arms": {**CELL["arms"], "reduce-overhead": failed}}
    golden("gpu-page.md", page.page(written({"cells": [CELL, more]})))


def test_a_page_shows_the_rules_of_capture_that_a_gpu_answers_differently(written, golden):
    text = page.page(written({"cells": [], "rules": rules.summary(EXPECTED, FOUND)}))
    golden("gpu-page-rules.md", text[text.index("### Rules of capture") :])


def test_a_page_of_a_run_cut_short_says_so_and_needs_nothing_that_comes_late(written):
    early = {
        "cells": [],
        "overhead": None,
        "monitor": None,
        "verdicts": [],
        "false_alarms": None,
        "kernel_time": [],
        "clocks": [],
    }
    text = page.page(written({**early, "ended_at": None}))
    assert "- the run was cut short" in text
    assert "NVML gave no readings." in text


def test_the_newest_run_of_each_device_is_shown(written):
    older, newer = {"began_at": "2026-11-20T09:00:00+00:00"}, {"began_at": "2026-11-22T09:00:00+00:00"}
    folder = written(newer, older)
    assert [run["began_at"] for run in page.latest_of_each_device(folder)] == [newer["began_at"]]
    assert evidence.newest(folder)["began_at"] == newer["began_at"]


def test_a_cell_measured_again_with_more_arms_replaces_the_first():
    again = {**CELL, "seconds": 60.0}
    assert page.cells_of({"cells": [CELL, again]})[("encoder", 8)]["seconds"] == 60.0


def test_attainable_is_eager_over_the_kernels_of_the_replay():
    assert page.attainable(RUN) == [("encoder", 8, 2.0, 2.5)]


def test_where_no_profiler_may_look_attainable_is_told_by_events():
    timed = {**CELL, "arms": {**CELL["arms"], "replay": {**REPLAY, "device_ns": 50e3}}}
    assert page.attainable({**RUN, "cells": [timed], "kernel_time": []}) == [("encoder", 8, 2.0, 2.0)]
    assert page.attainable({**RUN, "kernel_time": []}) == []


# The rules of capture


def test_the_committed_answers_have_every_rule_of_the_script_in_its_order():
    committed = rules.EMULATED.read_text(encoding="utf-8")
    assert list(capture_rules.parse(committed)) == list(capture_rules.RULES)
    assert "Emulated CUDA device" in capture_rules.machine(committed)
    assert set(capture_rules.DOUBTFUL) <= set(capture_rules.RULES)


def test_each_rule_is_asked_in_a_process_of_its_own_and_none_costs_the_others_their_answers(monkeypatch):
    def ends_its_process():
        os._exit(1)

    def hangs():
        signal.pause()

    def raises():
        raise ValueError("a name\nmore")

    monkeypatch.setattr(capture_rules, "RULE_LIMIT_S", 1.0)
    asked = {"dies": ends_its_process, "hangs": hangs, "raises": raises, "fine": lambda: f"{os.getpid() == ours}"}
    ours = os.getpid()
    assert capture_rules.answers(asked) == {
        "dies": "the process died",
        "hangs": "no answer within 1 s",
        "raises": "could not be asked, ValueError: a name",
        "fine": "False",
    }


def test_a_machine_without_a_cuda_device_is_told_before_any_rule_is_asked(monkeypatch):
    monkeypatch.setattr(capture_rules, "describe", lambda: torch.zeros(1, device="cuda:99"))
    monkeypatch.setattr(capture_rules, "RULES", {"asked": lambda: pytest.fail("asked")})
    with pytest.raises(SystemExit, match=r"^there is no CUDA device to ask: could not be asked, "):
        capture_rules.document()


def test_all_answers_are_kept_and_those_that_differ_are_returned(monkeypatch, tmp_path):
    script, expected = tmp_path / "script.py", tmp_path / "expected.txt"
    script.write_text(f"print({FOUND!r}, end='')", encoding="utf-8")
    expected.write_text(EXPECTED, encoding="utf-8")
    monkeypatch.setattr(rules, "SCRIPT", script)
    monkeypatch.setattr(rules, "EMULATED", expected)
    found = rules.ask(tmp_path / "gpu" / "answers.txt")
    assert (tmp_path / "gpu" / "answers.txt").read_text(encoding="utf-8") == FOUND
    assert (found["asked"], found["equal"]) == (2, 1)
    assert [each["rule"] for each in found["differences"]] == ["mask", "only there"]


def test_rules_that_cannot_be_asked_say_why(monkeypatch, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no CUDA here')", encoding="utf-8")
    monkeypatch.setattr(rules, "SCRIPT", script)
    with pytest.raises(RuntimeError, match="could not be asked: no CUDA here"):
        rules.ask(tmp_path / "answers.txt")


# Rehearsals


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rehearsal": True}, "a rehearsal on a CPU, which says nothing of a GPU"),
        ({"device": {**RUN["device"], "kind": "cpu"}}, "a rehearsal on a CPU, which says nothing of a GPU"),
        (
            {"device": {**RUN["device"], "name": "Emulated CUDA device (host memory)"}},
            "of an emulated CUDA device, which is no GPU",
        ),
        ({"schema": 2}, "not evidence of schema 1"),
    ],
)
def test_what_is_no_evidence_of_a_gpu_is_refused_by_page_and_age(written, tmp_path, capsys, change, why):
    folder = written(change)
    with pytest.raises(evidence.ForeignEvidence) as raised:
        page.page(folder)
    assert str(raised.value) == f"0.json: {why}"
    assert gpu_page.main(folder, tmp_path) == 1
    assert capsys.readouterr().err == f"0.json: {why}; nothing was written\n"
    assert not (tmp_path / "gpu.md").exists()


def test_a_damaged_file_is_refused_by_name(tmp_path):
    (tmp_path / "some-gpu").mkdir()
    (tmp_path / "some-gpu" / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(evidence.ForeignEvidence, match=r"^run\.json: cannot be read"):
        evidence.newest(tmp_path)


@pytest.fixture
def measure(monkeypatch):
    """The main function of ``benchmarks/gpu.py``."""
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from benchmarks import gpu

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        return gpu.main()

    monkeypatch.setattr(gpu.device, "why_no_gpu", lambda: gpu.device.EMULATED)
    return main


def test_a_rehearsal_must_say_where_its_file_goes(measure, capsys):
    with pytest.raises(SystemExit) as end:
        measure("--rehearse")
    assert end.value.code == 2
    told = "--rehearse needs --out: its figures are no evidence and must not lie among any"
    assert told in capsys.readouterr().err


def test_on_an_emulated_device_no_evidence_is_measured(measure, tmp_path, capsys):
    assert measure(f"--out={tmp_path}") == 1
    assert capsys.readouterr().err == (
        "no GPU can be used: an emulated CUDA device, which is no GPU; --rehearse runs the script on the CPU twin\n"
    )
    assert not list(tmp_path.iterdir())


def test_evidence_of_an_emulated_device_has_no_age(tmp_path):
    device = {**RUN["device"], "name": "Emulated CUDA device (host memory)"}
    evidence.write(tmp_path / "benchmarks" / "evidence" / "emulated" / "run.json", {**RUN, "device": device})
    assert evidence_age.age(tmp_path) == (
        "GPU evidence: unreadable: run.json: of an emulated CUDA device, which is no GPU"
    )


def test_a_figure_that_is_no_number_becomes_null_and_costs_nothing_else(tmp_path):
    evidence.write(tmp_path / "gpu" / "run.json", {**RUN, "cells": [{"a": float("nan"), "b": (1.0, float("inf"))}]})
    assert evidence.newest(tmp_path)["cells"] == [{"a": None, "b": [1.0, None]}]


# Its age


@pytest.fixture
def repository(tmp_path):
    """A repository with two files below ``src``; a function that runs git in it."""

    def git(*arguments):
        name = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        done = subprocess.run(["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "one.py").write_text("1\n", encoding="utf-8")
    (tmp_path / "src" / "package.txt").write_text("sorts before the folder's slash\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git


def measured_now(root):
    source = tree.source(root)
    evidence.write(root / "benchmarks" / "evidence" / "nvidia-h200" / "run.json", {**RUN, "source": source})
    return str(source["tree"])[:10]


def test_the_tree_is_gits_own_name_for_the_folder(repository, tmp_path):
    (tmp_path / "src" / "__pycache__").mkdir()
    (tmp_path / "src" / "__pycache__" / "one.pyc").write_bytes(b"")
    (tmp_path / "src" / "empty").mkdir()
    assert tree.tree_of(tmp_path / "src") == repository("rev-parse", "HEAD:src")
    assert tree.source(tmp_path)["dirty"] is False
    (tmp_path / "src" / "package" / "one.py").write_text("2\n", encoding="utf-8")
    assert tree.source(tmp_path)["dirty"] is True


def test_without_git_a_tree_is_known_and_whether_it_is_committed_is_not(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("1\n", encoding="utf-8")
    assert tree.source(tmp_path)["dirty"] is None


def test_no_evidence_has_no_age(tmp_path):
    assert evidence_age.age(tmp_path) == "GPU evidence: none yet"


def test_evidence_of_this_very_source_is_current(repository, tmp_path):
    measured = measured_now(tmp_path)
    (tmp_path / "README.md").write_text("not a source\n", encoding="utf-8")
    assert evidence_age.age(tmp_path) == f"GPU evidence: current (tree {measured}, 2026-11-21, NVIDIA H200)"


def test_evidence_is_stale_since_the_first_commit_that_changed_the_source(repository, tmp_path):
    measured = measured_now(tmp_path)
    (tmp_path / "src" / "package" / "one.py").write_text("2\n", encoding="utf-8")
    repository("commit", "-q", "-am", "second")
    second = repository("rev-parse", "HEAD")
    (tmp_path / "src" / "two.py").write_text("2\n", encoding="utf-8")
    repository("add", "src")
    repository("commit", "-q", "-m", "third")
    about = f"(tree {measured}, 2026-11-21, NVIDIA H200)"
    assert evidence_age.age(tmp_path) == f"GPU evidence: stale since {second[:10]}, 2 files {about}"


def test_changes_that_are_not_committed_make_it_stale_too(repository, tmp_path):
    measured = measured_now(tmp_path)
    (tmp_path / "src" / "package" / "one.py").write_text("2\n", encoding="utf-8")
    about = f"(tree {measured}, 2026-11-21, NVIDIA H200)"
    assert evidence_age.age(tmp_path) == (
        f"GPU evidence: stale since the last commit, files changed but not committed {about}"
    )


def test_evidence_of_a_source_that_was_never_committed_says_so(repository, tmp_path):
    one = tmp_path / "src" / "package" / "one.py"
    one.write_text("2\n", encoding="utf-8")
    measured_now(tmp_path)
    one.write_text("3\n", encoding="utf-8")
    assert "stale since an unknown commit: no commit of this history has that tree" in evidence_age.age(tmp_path)


def test_evidence_that_cannot_be_read_is_said_and_fails_nothing(written, tmp_path):
    evidence.write(tmp_path / "benchmarks" / "evidence" / "cpu" / "run.json", {**RUN, "rehearsal": True})
    assert evidence_age.age(tmp_path) == (
        "GPU evidence: unreadable: run.json: a rehearsal on a CPU, which says nothing of a GPU"
    )


# What the figures come from


def test_kernel_time_counts_kernels_copies_and_fills_and_nothing_else(tmp_path):
    events = [
        {"cat": "kernel", "name": "gemm", "dur": 30.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 2.0},
        {"cat": "gpu_memset", "name": "Memset", "dur": 1.0},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 100.0},
        {"name": "a mark without a category"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert extras.busy_of(path, calls=3) == {"busy_ns": 11_000.0, "works": 1.0}
    path.write_text(json.dumps({"traceEvents": events[3:]}), encoding="utf-8")
    with pytest.raises(RuntimeError, match="the profiler saw no work"):
        extras.busy_of(path, calls=3)


def test_every_arm_is_sampled_equally_often_in_one_loop():
    seen = []
    calls = {name: (lambda name=name: seen.append(name)) for name in ("eager", "replay", "other")}
    found = loop.interleave(calls, budget_s=0.01, synchronize=lambda: None, seed=1)
    counts = {len(samples) for samples in found.samples_ns.values()}
    assert len(counts) == 1
    assert len(found.blocks) >= 1
    assert set(seen) == set(calls)


def test_what_fails_or_does_not_fit_is_written_down_and_the_run_goes_on(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: out of memory\nmore")

    def absent():
        raise NotAvailable("not available on cpu")

    document = {"cells": [], "overhead": None, "left_out": [], "failures": []}
    steps = [
        schedule.Step(name="long", goes_to="cells", expected_s=1e9, run=lambda: pytest.fail("it cannot fit")),
        schedule.Step(name="broken", goes_to="cells", expected_s=0, run=broken),
        schedule.Step(name="absent", goes_to="cells", expected_s=0, run=absent),
        schedule.Step(name="fine", goes_to="cells", expected_s=0, run=lambda: {"model": "encoder"}),
        schedule.Step(name="cost", goes_to="overhead", expected_s=0, run=lambda: {"call": 1}),
    ]
    told = []
    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    schedule.run(steps, document, ends_s=10, after_step=told.append)
    assert document["cells"] == [{"model": "encoder"}]
    assert document["overhead"] == {"call": 1}
    assert document["failures"] == ["broken: RuntimeError: CUDA error: out of memory"]
    assert document["left_out"] == ["long: expected 1000000000 s, 10 s left", "absent: not available on cpu"]
    assert [line.partition(":")[0] for line in told] == ["broken", "absent", "fine", "cost"]


# An arm that fails


def broken_from(call_number):
    """An arm that works for so many calls."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) >= call_number:
            raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten\nmore")
        return torch.zeros(1)

    return call


@pytest.fixture
def lab(tmp_path):
    return cells.Lab(
        backend=open_backend("cpu"),
        scale=Scale(tiny=True, device="cpu"),
        cache_folder=tmp_path,
        sample_s=0.02,
        compile_limit_s=1.0,
        ends_s=extras.time.perf_counter() + 60,
    )


@pytest.fixture
def measured(monkeypatch, lab):
    """The arms of the smallest cell on the twin, of which one fails with its n-th call."""

    def measured(call_number):
        monkeypatch.setitem(arms._ARMS, "reduce-overhead", lambda at: broken_from(call_number))
        monkeypatch.setattr(arms, "CUDA_ONLY", ())
        cell = cells.Cell(model="classifier", batch_size=1, arms=("eager", "replay", "reduce-overhead"))
        return cells.measure_cell(lab, cell)

    return measured


@pytest.mark.slow
@pytest.mark.parametrize(("call_number", "when"), [(1, ""), (2, "while arms were timed together: ")])
def test_an_arm_that_fails_when_it_is_called_costs_no_figure_of_the_others(measured, call_number, when):
    cell = measured(call_number)
    error = "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten"
    assert cell["arms"]["reduce-overhead"] == {"reason": f"{when}{error}"}
    assert cell["arms"]["eager"]["samples"] == cell["arms"]["replay"]["samples"] > 0
    assert cell["speedup"] is not None
    assert cell["check"] == "agrees"


@pytest.mark.slow
def test_compilers_that_cannot_be_cleaned_up_cost_no_figure(measured, monkeypatch):
    def broken():
        raise AttributeError("partially initialized module 'torch._dynamo'")

    monkeypatch.setattr("torch._dynamo.reset", broken)
    cell = measured(1_000_000)
    assert cell["speedup"] is not None
    assert cell["not_cleaned_up"] == "AttributeError: partially initialized module 'torch._dynamo'"


def test_compilers_come_after_all_that_is_short_and_everything_has_a_place_in_the_file(tmp_path):
    extent = schedule.Extent(
        batch_sizes=(1, 2, 4, 8, 32, 96),
        cell_s=4,
        compiled_cell_s=60,
        overhead_s=4,
        monitor_s=1,
        alarms=200,
        alarms_s=80,
        trace_s=3,
        trace_rows=18_000,
        folder_of_traces=tmp_path,
        compiled_models=("classifier", "encoder", "cnn"),
    )
    steps = schedule.timed(None, extent)
    first_compiler = next(number for number, step in enumerate(steps) if "6 arms" in step.name)
    before = {step.goes_to for step in steps[:first_compiler]}
    assert before == {"cells", "overhead", "monitor", "verdicts", "false_alarms", "traces"}
    assert sum(step.expected_s for step in steps[:first_compiler]) < 300
    assert {step.goes_to for step in schedule.profiled(None, extent)} == {"kernel_time"}


def test_the_monitor_is_weighed_against_a_replay_without_it(lab):
    found = extras.monitor_cost(lab, cells.Cell(model="classifier", batch_size=1, arms=("eager", "replay")), 0.02)
    assert found["reading"]["samples"] == found["replay"]["samples"] == found["replay_after_reading"]["samples"] > 0

"""What a run that is one of several processes counts on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests import facts

from pytest_cudagraph import device
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.device import Choice
from pytest_cudagraph.gate import judge_baseline, judge_speedup, judge_structure
from pytest_cudagraph.pipeline import device_context
from pytest_cudagraph.pipeline.device_context import open_device_context
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS
from pytest_cudagraph.values import NoBaseline, Receipt, Verdict

NO_GPU = device.Missing(found="no driver", remedy="install one")
EMULATED_CHOICE = device.Choice(kind="cuda", judged=False, reason="this is an emulated CUDA device")


@pytest.mark.parametrize(
    ("given", "waiting"),
    [
        ({"workers": 0, "device": "cuda"}, 0),
        ({"workers": 1, "device": "auto"}, 0),
        ({"workers": 1, "device": "cuda"}, 1),
        ({"workers": 1, "require_gpu": True}, 1),
    ],
)
def test_xdists_controller_that_has_looked_for_a_gpu_is_no_neighbour_of_its_worker(
    tmp_path, monkeypatch, given, waiting
):
    monkeypatch.setattr(device, "why_no_gpu", lambda: None)
    settings = Settings(**{option.setting: option.default for option in OPTIONS}, rootdir=tmp_path)
    assert open_device_context("cpu", replace(settings, **given)).waiting_processes == waiting


@pytest.mark.parametrize(
    ("given", "asked_for"),
    [({}, False), ({"strict": True}, True), ({"strict": True, "update": "new"}, False), ({"update": "all"}, False)],
)
def test_a_missing_entry_is_a_lack_under_strict_unless_this_run_saves_it(tmp_path, given, asked_for):
    settings = Settings(**{option.setting: option.default for option in OPTIONS} | given, rootdir=tmp_path)
    device_context = open_device_context("cpu", settings)
    reason = f"no entry in .cudagraph/{device_context.baseline_file.name} yet"
    assert device_context.find_saved("a", 8) == NoBaseline(comparison="new", reason=reason, asked_for=asked_for)


@pytest.mark.parametrize(("update", "comparison"), [("never", "not-comparable"), ("new", "new"), ("changed", "new")])
def test_what_another_device_has_saved_does_not_keep_this_one_from_saving(tmp_path, update, comparison):
    settings = Settings(
        **{option.setting: option.default for option in OPTIONS} | {"update": update, "strict": True}, rootdir=tmp_path
    )
    here = open_device_context("cpu", settings)
    elsewhere = facts.saved("a", 8)
    reason = f"the baseline is of NVIDIA H200; this run is on {here.device.name}"
    found = replace(here, elsewhere=(elsewhere,)).find_saved("a", 8)
    assert found == NoBaseline(comparison=comparison, reason=reason)


def context_of(tmp_path, option="cpu", **given):
    settings = Settings(**{each.setting: each.default for each in OPTIONS} | given, rootdir=tmp_path)
    return open_device_context(option, settings)


def test_the_newest_kernel_count_of_any_cpu_counts_and_a_gpus_does_not(tmp_path):
    of_gpu = facts.saved("a", 8, saved_at="2026-11-30")
    old, new = (facts.saved("a", 8, device=facts.CPU, saved_at=date) for date in ("2026-11-01", "2026-11-02"))
    newest = facts.saved("a", 8, device=facts.CPU, saved_at="2026-11-02T12")
    other = facts.saved("b", 8, device=facts.CPU, saved_at="2026-11-29")
    device_context = replace(context_of(tmp_path), elsewhere=(of_gpu, new, old, other))
    assert device_context.newest_count("a", 8) == new
    assert replace(device_context, saved=facts.by_key(old)).newest_count("a", 8) == new
    assert replace(device_context, saved=facts.by_key(newest)).newest_count("a", 8) == newest
    assert replace(device_context, elsewhere=(of_gpu,)).newest_count("a", 8) is None
    assert replace(device_context, device=facts.H200).newest_count("a", 8) is None


@pytest.mark.parametrize(
    ("option", "given", "update_option"),
    [
        ("cpu", {}, "--cudagraph-device=cpu --cudagraph-update"),
        ("auto", {}, "--cudagraph-device=cpu --cudagraph-update"),
        (
            "cpu",
            {"baseline": "kept here"},
            "--cudagraph-device=cpu --cudagraph-baseline='kept here' --cudagraph-update",
        ),
        ("cpu", {"workers": 2}, "--cudagraph-device=cpu --cudagraph-update without -n"),
        ("auto", {"workers": 2}, "--cudagraph-device=cpu --cudagraph-update without -n"),
    ],
)
def test_what_writes_a_baseline_is_told_as_it_works_here(tmp_path, monkeypatch, option, given, update_option):
    monkeypatch.setattr(device, "why_no_gpu", lambda: NO_GPU)
    assert context_of(tmp_path, option, **given).update_option == update_option


def test_without_a_baseline_nothing_is_read_or_missed(tmp_path):
    (tmp_path / "off").write_text("a file in the place of the folder", encoding="utf-8")
    found = context_of(tmp_path, baseline="off", strict=True).find_saved("a", 8)
    assert found == NoBaseline(comparison="off", reason="no baseline is used")


def test_on_an_emulated_device_nothing_is_judged_or_saved_and_a_gpu_is_told_as_the_place_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "choose", lambda option, *, require_gpu: EMULATED_CHOICE)
    monkeypatch.setattr(device, "describe", lambda kind: facts.EMULATED)
    monkeypatch.setattr("pytest_cudagraph.pipeline.device_context.open_backend", lambda kind: open_backend("cpu"))
    context = context_of(tmp_path, "cuda", update="all")
    assert (context.replaces, context.saves) == (False, False)
    assert context.update_option == "--cudagraph-update on a GPU"
    batch = context.measured_batch("a", 8, facts.timing(), Receipt(batch_size=8, operations=1, kernels=1))
    for found in (judge_speedup(batch, 1.15), judge_speedup(batch, 1000.0)):
        assert found.verdict is Verdict.NOT_JUDGED
        assert found.reason == "speed is not judged: this is an emulated CUDA device"


@pytest.mark.parametrize(("option", "opens"), [("cpu", True), ("auto", False)])
def test_an_update_where_nothing_is_written_holds_tests_to_what_is_saved(tmp_path, monkeypatch, option, opens):
    monkeypatch.setattr(device, "why_no_gpu", lambda: NO_GPU)
    device_context = context_of(tmp_path, option, update="all")
    saved = facts.saved("a", 8, device=device_context.device)
    device_context = replace(device_context, saved={("a", 8): saved})
    assert (device_context.replaces, device_context.saves) == (opens, opens)
    receipt = Receipt(batch_size=8, operations=1, kernels=1)
    batch = device_context.measured_batch("a", 8, facts.timing(replay_us=600.0), receipt)
    assert judge_baseline(batch, 0.1)[1] == ("off" if opens else "slower")
    assert judge_structure(batch, 0).verdict is Verdict.PASSED


def test_speed_is_judged_by_an_xdist_worker_with_its_own_gpu_and_no_other():
    settings = Settings(**{option.setting: option.default for option in OPTIONS})
    own = replace(settings, workers=2, has_own_gpu=True)
    shared = replace(settings, workers=2, why_shared="2 xdist workers share 1 GPU")
    gpu, cpu = (Choice(kind=kind, judged=True, reason="") for kind in ("cuda", "cpu"))
    why = device_context._why_not_judged

    assert (why(gpu, own), why(gpu, shared)) == ("", "2 xdist workers share 1 GPU")
    assert why(cpu, own) == why(cpu, shared) == "2 xdist workers share this machine; run without -n to judge speed"
    assert device_context._update_option(gpu, own) == "--cudagraph-update"
    assert device_context._update_option(gpu, shared) == "--cudagraph-update without -n"

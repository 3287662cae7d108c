"""``pytest-cudagraph history``: the sessions of all revisions, where a side moved, and what is missing."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import H200, latency, saved, sessions

from pytest_cudagraph.baseline import JsonStore, any_path
from pytest_cudagraph.cli import main
from pytest_cudagraph.environment import without_git_locals

DOCS = Path(__file__).parents[2] / "docs"

MLP = "tests/test_a.py::test_mlp"
NEWER = replace(H200, torch="2.13.0")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty git repository, in which the test runs. Gives a function that commits entries as the whole baseline."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")

    def commit(*entries):
        path = JsonStore(tmp_path / ".cudagraph", H200).path
        path.unlink(missing_ok=True)
        JsonStore(tmp_path / ".cudagraph", H200).merge(entries, commit_info={})
        git(tmp_path, "add", "-f", str(path))
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "baseline")
        return path

    return commit


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, env=without_git_locals(), timeout=30)


@pytest.fixture
def said(capsys):
    def run(*argv):
        code = main(["history", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def steady(*medians_us, first=1, **facts):
    """An entry with these sessions, one a day from the ``first`` of the month."""
    days = sessions(*[1.0] * (first - 1), *medians_us, reference_us=100.0, device=facts.get("device", H200))
    entry = saved(MLP, **facts)
    return replace(entry, sessions=days[first - 1 :], saved_at=f"{days[-1].date}T09:00:00+00:00")


QUIET = (60.0, 60.3, 59.7, 60.1, 59.9, 60.2)


def story(commit):
    """Five quiet sessions, a slower replay of other kernels under another torch, then a slower eager."""
    commit(steady(*QUIET))
    commit(steady(72.0, first=7, device=NEWER, kernels=62), saved("tests/test_b.py::test_still", 1))
    return commit(
        steady(72.0, 72.4, first=7, device=NEWER, kernels=62, eager=latency(180.0)),
        saved("tests/test_b.py::test_still", 1),
    )


def test_each_side_is_named_with_the_session_at_which_it_moved(repository, said, golden):
    story(repository)
    code, out, err = said()
    assert (code, err) == (0, "")
    named = said("test_mlp")[1]
    golden("cli/history.txt", f"{out}\n$ history test_mlp\n{named}")
    assert f"$ pytest-cudagraph history\n{out}```" in (DOCS / "command.md").read_text(encoding="utf-8")


def test_sessions_that_left_the_file_come_from_earlier_revisions(repository, said):
    repository(steady(*QUIET))
    repository(steady(*QUIET[3:], first=4))
    repository(steady(*QUIET[3:], 60.0, first=4))
    out = said(MLP)[1]
    assert f"{MLP}, batch 8: 7 sessions, 2026-11-01 to 2026-11-07" in out
    assert out.splitlines()[-1] == "0 of 1 entries moved"


def test_the_bound_is_the_gates_and_a_smaller_move_is_shown_on_request(repository, said):
    repository(steady(*QUIET, 61.2))
    assert said()[1].splitlines()[-1] == "0 of 1 entries moved"
    shown = said("--least-change", "0")[1]
    assert "2026-11-07  0000007  replay  60.0 µs  61.2 µs  +1.9 %" in shown


def test_latencies_of_other_hardware_are_not_compared(repository, said):
    repository(steady(*QUIET, device=replace(H200, power_limit_w=700)))
    repository(steady(90.0, first=7, device=replace(H200, power_limit_w=500)))
    out = said(MLP)[1]
    assert "7 sessions" in out
    assert out.splitlines()[-1] == "0 of 1 entries moved"


def test_what_is_not_committed_counts_and_a_note_says_what_is_missing(repository, said, tmp_path):
    path = repository(steady(*QUIET))
    path.write_text("{}", encoding="utf-8")
    git(tmp_path, "commit", "-q", "-am", "broken")
    path.unlink()
    JsonStore(path.parent, H200).merge([steady(*QUIET, 75.0)], commit_info={})
    out = said()[1].splitlines()
    assert out[0] == ".cudagraph/nvidia-h200.json: 1 revision"
    assert out[1].startswith("left out: ")
    assert "not a baseline" in out[1]
    assert any("2026-11-07  0000007  replay" in line for line in out)


def test_a_change_that_the_latencies_alone_do_not_give_says_that_the_machine_moved(repository, said):
    entry = steady(*QUIET, 72.0)
    last = replace(entry.sessions[-1], reference_q25_ns=78.4e3, reference_median_ns=80e3)
    repository(replace(entry, sessions=(*entry.sessions[:-1], last)))
    lines = said()[1].splitlines()
    (row,) = [number for number, line in enumerate(lines) if " replay " in line]
    assert "72.0 µs" in lines[row]
    assert "+50 %" in lines[row]
    assert lines[row + 1].strip() == "relative to the machine, which moved by -20 %"


@pytest.mark.parametrize(
    ("commands", "note"),
    [
        ([["init", "-q"]], "is not in a git repository with commits, or git is missing"),
        ([["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]], "was never committed"),
    ],
    ids=["no commit", "untracked"],
)
def test_without_revisions_the_file_alone_is_shown(said, tmp_path, monkeypatch, commands, note):
    monkeypatch.chdir(tmp_path)
    for command in commands:
        git(tmp_path, *command)
    JsonStore(tmp_path / ".cudagraph", H200).merge([steady(*QUIET)], commit_info={})
    code, out, _ = said(MLP)
    assert code == 0
    assert out.splitlines()[:2] == [
        ".cudagraph/nvidia-h200.json: 0 revisions",
        f".cudagraph/nvidia-h200.json {note}: only the sessions in the file are shown",
    ]
    assert f"{MLP}, batch 8: 6 sessions" in out


def test_the_entries_of_a_store_have_no_revisions(said):
    folder = any_path("memory://history/baselines")
    JsonStore(folder, H200).merge([steady(*QUIET)], commit_info={})
    out = said("--baseline", str(folder))[1].splitlines()
    assert out[0] == "memory://history/baselines/nvidia-h200.json: 0 revisions"
    assert "is not in a git repository: only the sessions in the file are shown" in out[1]


def test_a_least_change_that_is_no_fraction_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="4"):
        main(["history", "--least-change", "2"])
    assert "2 is not a fraction from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--baseline", "nowhere"], "no baseline in nowhere: pytest --cudagraph --cudagraph-update saves one"),
        (["test_mpl"], f"no saved entry has a name with test_mpl; nearest: {MLP} (baseline show lists all)"),
        (["--html", "."], ".: the page could not be written (Is a directory); nothing was changed"),
    ],
    ids=["no file", "unknown name", "page"],
)
def test_bad_input_is_one_line_and_exit_4(repository, said, argv, message):
    repository(steady(*QUIET))
    assert said(*argv) == (4, "", f"pytest-cudagraph: {message}\n")


def test_the_page_shows_the_moves_and_a_plot_for_each_side(repository, said, tmp_path, golden):
    from tests.unit.report.test_page import shown

    story(repository)
    assert said("--html", "history.html")[1].splitlines()[-1] == "wrote history.html"
    text = (tmp_path / "history.html").read_text(encoding="utf-8")
    assert text.count("<svg class=p ") == 4
    golden("cli/history-page.txt", shown(text))

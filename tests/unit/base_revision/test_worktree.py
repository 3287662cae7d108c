"""A revision is found by any name git knows, and its checkout never outlives its use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from pytest_cudagraph import errors
from pytest_cudagraph.base_revision import checkout


def git(folder, *arguments):
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits: ``model.py`` says 1, then 2; the working tree says 3."""
    top = tmp_path / "project"
    top.mkdir()
    git(top, "init", "--quiet")
    for number in (1, 2):
        (top / "model.py").write_text(f"NUMBER = {number}\n")
        git(top, "add", ".")
        git(top, "commit", "--quiet", "-m", str(number))
    (top / "model.py").write_text("NUMBER = 3\n")
    return top


def worktrees(top):
    return git(top, "worktree", "list").splitlines()


def test_a_checkout_holds_the_revision_and_leaves_the_working_tree_alone(repository):
    with checkout.checked_out(checkout.find_revision(repository, "HEAD~1")) as tree:
        assert (tree / "model.py").read_text() == "NUMBER = 1\n"
        assert tree.name == "project"
        assert len(worktrees(repository)) == 2
    assert not tree.exists()
    assert len(worktrees(repository)) == 1
    assert (repository / "model.py").read_text() == "NUMBER = 3\n"


def test_a_checkout_is_removed_after_ctrl_c(repository):
    with (
        pytest.raises(KeyboardInterrupt),
        checkout.checked_out(checkout.find_revision(repository, "HEAD")) as tree,
    ):
        raise KeyboardInterrupt
    assert not tree.exists()
    assert len(worktrees(repository)) == 1


def test_a_checkout_is_removed_after_a_termination_and_the_handler_is_put_back(repository):
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt),
        checkout.checked_out(checkout.find_revision(repository, "HEAD")) as tree,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not tree.exists()
    assert len(worktrees(repository)) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_checkout_that_changed_is_removed_all_the_same(repository):
    with checkout.checked_out(checkout.find_revision(repository, "HEAD")) as tree:
        (tree / "model.py").write_text("changed")
        (tree / "left_behind.txt").write_text("x")
    assert not tree.exists()
    assert len(worktrees(repository)) == 1


@pytest.mark.parametrize("name", ["HEAD~1", "main-of-mine", "v1"])
def test_a_revision_is_found_by_what_git_calls_it(repository, name):
    git(repository, "branch", "main-of-mine", "HEAD~1")
    git(repository, "tag", "-a", "-m", "one", "v1", "HEAD~1")
    found = checkout.find_revision(repository, name)
    assert found.commit == git(repository, "rev-parse", "HEAD~1")
    assert str(found) == f"{name} ({found.commit[:7]})"


@pytest.mark.parametrize("name", ["no-such-branch", "HEAD~9", "--help", "HEAD:model.py"])
def test_a_name_that_is_no_commit_is_refused(repository, name):
    with pytest.raises(errors.RevisionError) as caught:
        checkout.find_revision(repository, name)
    assert str(caught.value) == (
        f"a branch, tag or commit of this repository is allowed; found {name!r}, which names none here\n"
        "  a shallow clone lacks older commits: fetch them first (git fetch --unshallow)"
    )


def test_a_folder_without_a_repository_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(errors.RevisionError) as caught:
        checkout.find_revision(tmp_path, "HEAD")
    assert str(caught.value) == f"a git repository is needed to check out 'HEAD'; {tmp_path} lies in none"


def test_a_machine_without_git_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.RevisionError) as caught:
        checkout.find_revision(tmp_path, "HEAD")
    assert str(caught.value.__cause__) == "git is needed and is not on the PATH"


CHECKS_OUT = """
import pathlib, sys
from pytest_cudagraph.base_revision import checkout

with checkout.checked_out(checkout.find_revision(pathlib.Path.cwd(), "HEAD~1")) as tree:
    print((tree / "model.py").read_text())
"""


def test_a_checkout_within_a_hook_leaves_the_commit_that_is_being_made_alone(repository):
    """``git commit -a`` and ``git commit FILE`` make theirs with an index of their own, which the hook inherits."""
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{sys.executable} -c '{CHECKS_OUT}' > hooked 2>&1\n")
    hook.chmod(0o755)
    for arguments in (["--all"], ["model.py"]):
        (repository / "model.py").write_text(f"NUMBER = {arguments[0]!r}\n")
        before = git(repository, "rev-parse", "HEAD~1")
        git(repository, "commit", "--quiet", "-m", "3", *arguments)
        assert (repository / "hooked").read_text() == git(repository, "show", f"{before}:model.py") + "\n\n"
        assert git(repository, "show", "HEAD:model.py") == f"NUMBER = {arguments[0]!r}"
        assert git(repository, "status", "--short") == "?? hooked"
        assert len(worktrees(repository)) == 1


def test_variables_of_another_repository_are_not_heard(repository, tmp_path, monkeypatch):
    other = tmp_path / "other"
    git(tmp_path, "init", "--quiet", str(other))
    expected = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    found = checkout.find_revision(repository, "HEAD")
    assert (found.commit, found.top) == (expected, repository)
    with checkout.checked_out(found) as tree:
        assert (tree / "model.py").read_text() == "NUMBER = 2\n"
    assert not tree.exists()
    assert not (repository / ".git" / "worktrees").exists()


def test_worktrees_that_are_out_of_reach_just_now_stay_registered(repository, tmp_path):
    """On a disk that is not mounted, or outside of this container."""
    theirs, away = tmp_path / "theirs", tmp_path / "away"
    git(repository, "worktree", "add", "--quiet", "--detach", str(theirs))
    theirs.rename(away)
    with checkout.checked_out(checkout.find_revision(repository, "HEAD")):
        pass
    assert len(worktrees(repository)) == 2
    away.rename(theirs)
    assert git(theirs, "status", "--short") == ""


def _broken(tree):
    """As an interrupt may leave a checkout, or a test that cleans up too much."""
    yield lambda: shutil.rmtree(tree)
    yield lambda: (tree / ".git").unlink()
    yield lambda: (tree / ".git").write_text("gitdir: /nowhere\n")


@pytest.mark.parametrize("number", range(3))
def test_a_checkout_that_is_broken_is_taken_off_the_list_all_the_same(repository, number):
    with checkout.checked_out(checkout.find_revision(repository, "HEAD")) as tree:
        list(_broken(tree))[number]()
    assert not tree.exists()
    assert len(worktrees(repository)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_cudagraph.base_revision import checkout
with checkout.checked_out(checkout.find_revision(Path(sys.argv[1]), "HEAD")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_the_checkout_of_a_killed_process_is_removed_by_the_next_one_and_no_other(repository, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(checkout.tempfile, "tempdir", str(temporary))
    subprocess.run([sys.executable, "-c", KILLED, str(repository)], check=False)
    git(repository, "worktree", "add", "--detach", str(temporary / "pytest-cudagraph-mine" / "project"))
    assert len(worktrees(repository)) == 3
    with checkout.checked_out(checkout.find_revision(repository, "HEAD")) as running:
        assert len(worktrees(repository)) == 3
        with checkout.checked_out(checkout.find_revision(repository, "HEAD")):
            assert len(worktrees(repository)) == 4
            assert running.is_dir()
    assert [path.name for path in temporary.iterdir()] == ["pytest-cudagraph-mine"]

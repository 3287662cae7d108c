"""What is known of the machine and of the code under test."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from pytest_cudagraph import environment

CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R)  Xeon(R) Processor\nmodel name\t: other\n"


def test_the_cpu_is_named_by_the_kernel(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(CPUINFO)
    assert environment.host_cpu_name(file) == "Intel(R) Xeon(R) Processor"


@pytest.mark.parametrize("text", ["", "model name\t:\nCPU part\t: 0xd40\n"])
def test_a_kernel_that_names_no_model_leaves_it_to_python(tmp_path, monkeypatch, text):
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert environment.host_cpu_name(file) == "aarch64"
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert environment.host_cpu_name(tmp_path / "none") == "arm"


def test_a_cpu_without_any_name_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    assert environment.host_cpu_name(tmp_path / "none") == "unknown CPU"


def test_versions_are_those_that_run():
    assert environment.python_version() == ".".join(map(str, sys.version_info[:3]))
    assert environment.torch_version() == torch.__version__
    assert environment.platform_text() == platform.platform()


def test_importing_the_environment_does_not_import_torch():
    code = "import sys, pytest_cudagraph.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def git(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ada@example.org")
        monkeypatch.setenv(f"GIT_{who}_DATE", "2026-01-02T03:04:05+00:00")
    root = tmp_path / "model-zoo"
    root.mkdir()

    def run(*arguments):
        return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout

    run("init", "--initial-branch=main")
    run.root = root
    return run


def commit_file(git):
    (git.root / "a.txt").write_text("one")
    git("add", "a.txt")
    git("commit", "--message=first")
    return git("rev-parse", "HEAD").strip()


def test_a_commit_is_described_in_pytest_benchmarks_shape(git):
    identity = commit_file(git)
    (git.root / "untracked.txt").write_text("x")
    found = environment.commit(git.root)
    assert found == {
        "id": identity,
        "time": found["time"],
        "author_time": found["time"],
        "dirty": False,
        "project": "model-zoo",
        "branch": "main",
    }
    assert found["time"] in ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05Z")


def test_a_changed_file_is_dirt_and_a_detached_head_has_no_branch(git):
    identity = commit_file(git)
    git("checkout", "--detach", identity)
    (git.root / "a.txt").write_text("two")
    found = environment.commit(git.root)
    assert (found["dirty"], found["branch"]) == (True, "(detached head)")


@pytest.mark.parametrize("url", ["https://example.org/team/zoo.git", "git@example.org:team/zoo.git", "/srv/git/zoo/"])
def test_a_project_is_named_as_at_its_remote(git, url):
    commit_file(git)
    git("remote", "add", "origin", url)
    assert environment.commit(git.root)["project"] == "zoo"


def test_a_signed_commit_whose_signature_git_likes_to_show_is_described_like_any_other(git):
    program, signature = git.root.parent / "gpg", git.root.parent / "signature"
    signature.write_text("-----BEGIN PGP SIGNATURE-----\n\nx\n-----END PGP SIGNATURE-----\n")
    said = "gpg: Good signature\\n\\n[GNUPG:] SIG_CREATED "
    program.write_text(f"#!/bin/sh\ncat > {os.devnull}\ncat {signature}\nprintf '{said}' >&2\n")
    program.chmod(0o755)
    git("config", "gpg.program", str(program))
    git("config", "commit.gpgSign", "true")
    git("config", "log.showSignature", "true")
    identity = commit_file(git)
    assert git("log", "-1", "--format=%H") != f"{identity}\n"
    found = environment.commit(git.root)
    assert (found["id"], found["time"]) == (identity, found["author_time"])


@pytest.fixture
def changed_git(monkeypatch):
    """Let git print ``change(command, what it prints)``."""
    run = subprocess.run

    def set_up(change):
        def changed_run(command, **how):
            done = run(command, **how)
            done.stdout = change(command, done.stdout)
            return done

        monkeypatch.setattr(subprocess, "run", changed_run)

    return set_up


@pytest.mark.parametrize("printed", [b"", b"one line", b"a\nb\nc", b"\n\n\n\n"])
def test_a_git_that_prints_something_else_is_no_error(git, changed_git, printed):
    commit_file(git)
    changed_git(lambda command, stdout: printed)
    assert environment.commit(git.root) is None


def test_lines_around_the_commit_are_ignored(git, changed_git):
    identity = commit_file(git)
    changed_git(lambda command, stdout: b"warning: x\n%b\n\nmore" % stdout if "log" in command else stdout)
    assert environment.commit(git.root)["id"] == identity


def test_within_a_hook_of_another_repository_the_commit_is_that_of_the_folder(git, tmp_path, monkeypatch):
    identity = commit_file(git)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index.lock"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    found = environment.commit(git.root)
    assert (found["id"], found["dirty"], found["project"]) == (identity, False, "model-zoo")


def test_a_description_takes_no_lock_that_another_git_may_want(git, monkeypatch):
    commit_file(git)
    run, seen = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda command, **how: seen.append(command) or run(command, **how))
    environment.commit(git.root)
    assert all("--no-optional-locks" in command for command in seen)


def test_a_description_starts_no_program_that_the_repository_names(git, tmp_path):
    commit_file(git)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ntouch started\n")
    program.chmod(0o755)
    git("config", "core.fsmonitor", str(program))
    environment.commit(git.root)
    assert not (git.root / "started").exists()


def test_no_variable_that_names_a_repository_is_handed_on(monkeypatch):
    told = subprocess.run(["git", "rev-parse", "--local-env-vars"], check=True, capture_output=True, text=True)
    names = [name for name in told.stdout.split() if not name.startswith("GIT_CONFIG_")]
    assert "GIT_INDEX_FILE" in names
    for name in names:
        monkeypatch.setenv(name, "x")
    # Of git, and of no repository: who wrote what, and which folders are to be trusted.
    for name in ("GIT_AUTHOR_NAME", "GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS", "LANG"):
        monkeypatch.setenv(name, "y")
    found = environment.without_git_locals()
    assert found == {name: value for name, value in os.environ.items() if name not in names}


def test_a_repository_without_a_commit_has_none(git):
    assert environment.commit(git.root) is None


def test_a_folder_outside_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.commit(tmp_path) is None
    assert environment.commit(tmp_path / "missing") is None


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_a_git_that_is_missing_or_hangs_is_no_error(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment.commit(tmp_path) is None


def test_a_status_that_cannot_be_read_counts_as_dirty(git, changed_git):
    def fail(command, stdout):
        if "status" in command:
            raise subprocess.CalledProcessError(128, command)
        return stdout

    commit_file(git)
    changed_git(fail)
    assert environment.commit(git.root)["dirty"] is True

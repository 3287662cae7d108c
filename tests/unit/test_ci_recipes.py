"""The files that ``docs/ci.md`` and the tutorial give to CI servers: each is parsed, and its shell lines are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest

from pytest_cudagraph.cli import make_parser
from pytest_cudagraph.settings.options import read_settings

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(yaml|groovy)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("ci.md", "tutorial.md")]


def scripts():
    """The name and the shell lines of each job."""
    for kind, text in (found for page in TEXTS for found in BLOCK.findall(page)):
        if kind == "groovy":
            yield "Jenkins", textwrap.dedent(re.search(r"sh '''(.*?)'''", text, re.DOTALL)[1])
            continue
        found = yaml.safe_load(text)
        jobs = found.get("jobs") or {name: job for name, job in found.items() if "script" in job}
        for name, job in jobs.items():
            steps = [step["run"] for step in job["steps"] if "run" in step] if "jobs" in found else job["script"]
            yield f"{found.get('name', 'GitLab')}: {name}", "\n".join(steps)


SCRIPTS = dict(scripts())


@pytest.fixture
def job(pytester, monkeypatch):
    """Run a script in a checkout whose branch can be pushed. Gives the program, its arguments, what was pushed.

    The programs only note what they are called with. A run that updates writes a file.
    """
    programs = pytester.mkdir("programs")
    writes = "mkdir -p .cudagraph && touch .cudagraph/gpu.json"
    does = {
        "pip": ":",
        "pytest": f'case "$*" in *--cudagraph-update*) {writes};; esac',
        "pytest-cudagraph": writes,
        "python3": 'mkdir -p "$3/bin" && touch "$3/bin/activate"',
    }
    for name, what in does.items():
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {programs}/{name}.txt\n{what}\n')
        (programs / name).chmod(0o755)
    for name, value in {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "GITHUB_BASE_REF": "main"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CI_MERGE_REQUEST_DIFF_BASE_SHA", "1a2b3c4")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (
        ["git", "init", "-q", "--bare", "remote"],
        ["git", "clone", "-q", "remote", "checkout"],
        [*git, "-C", "checkout", "commit", "-q", "--allow-empty", "-m", "first"],
        ["git", "-C", "checkout", "push", "-q", "-u", "origin", "HEAD"],
    ):
        subprocess.run(command, check=True, capture_output=True)

    def run(script):
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd="checkout", check=True, timeout=60)
        (called,) = programs.glob("pytest*.txt")
        pushed = ["git", "-C", "remote", "log", "--name-only", "--format=%s"]
        files = subprocess.run(pushed, check=True, capture_output=True, text=True).stdout.splitlines()
        return called.stem, called.read_text(encoding="utf-8").splitlines(), files

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_shell_lines_run_and_the_program_knows_their_options(name, job, pytester):
    program, (call,), pushed = job(SCRIPTS[name])
    if program == "pytest":
        settings = read_settings(pytester.parseconfig(*shlex.split(call)))
        assert settings.enabled
        assert (settings.base or "main").removeprefix("origin/") in ("main", "1a2b3c4")
    else:
        make_parser().parse_args(shlex.split(call))
    assert (".cudagraph/gpu.json" in pushed) == ("git push" in SCRIPTS[name])


def test_there_are_recipes_for_three_servers_with_and_without_a_gpu():
    assert {name.partition(":")[0] for name in SCRIPTS} >= {"CUDA graphs", "GitLab", "Jenkins"}
    with_gpu = {name.partition(":")[0] for name, script in SCRIPTS.items() if "--cudagraph-require-gpu" in script}
    assert {"CUDA graphs on a GPU", "GitLab", "Jenkins"} <= with_gpu


def test_no_workflow_on_a_gpu_runs_the_code_of_a_fork():
    found = [yaml.safe_load(text) for page in TEXTS for kind, text in BLOCK.findall(page) if kind == "yaml"]
    # YAML 1.1 reads the key "on" as true.
    jobs = [job for each in found for job in each.get("jobs", {}).values() if "pull_request" in each[True]]
    on_gpu = [job for job in jobs if "self-hosted" in job["runs-on"]]
    assert len(on_gpu) >= 2
    assert all("head.repo.full_name == github.repository" in job["if"] for job in on_gpu)

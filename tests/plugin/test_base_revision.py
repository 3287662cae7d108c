"""``--cudagraph-base``: two revisions of a repository, measured in turn, judged test by test, nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

# A clock that only the models move: the verdicts are those of the readings, whatever else this machine does. And two
# pairs of processes instead of five, because each process takes seconds to import torch.
CONFTEST = """
import model
import pytest
from pytest_cudagraph.base_revision import comparison, judge
from pytest_cudagraph.measure import PerfCounterClock

patch = pytest.MonkeyPatch()
patch.setattr(comparison, "LOOKS", (2,))
patch.setitem(judge._T_QUANTILES, 1, 63.657)
for reading in ("now_ns", "cpu_time_ns"):
    patch.setattr(PerfCounterClock, reading, lambda self: model.now_ns)
pytest_unconfigure = patch.undo
"""

MODEL = """
import torch
from torch import nn

now_ns = 0


def work(x, cost_ns):
    global now_ns
    now_ns += cost_ns
    return x * 2


# torch.library.custom_op would import the compiler, which takes seconds.
library = torch.library.Library("user", "DEF")
library.define("work(Tensor x, int cost_ns) -> Tensor")
library.impl("work", work, "CPU")


class Model(nn.Module):
    def __init__(self, cost_ns=10_000_000):
        super().__init__()
        self.cost_ns = cost_ns

    def forward(self, x):
        global now_ns
        now_ns += 6_000_000
        return torch.ops.user.work(x, self.cost_ns)


def make_model():
    return Model({cost_ns})
"""

TESTS = """
from model import Model, make_model
import torch


def test_model(cudagraph):
    cudagraph(make_model(), torch.randn(1, 4))
"""

MORE_TESTS = """

def test_steady(cudagraph):
    cudagraph(Model(), torch.randn(1, 4))


def test_weights(cudagraph):
    open(__file__.replace("test_user.py", "weights.bin")).read()
    cudagraph(Model(), torch.randn(1, 4))
"""

# What is refused before anything is measured needs no torch.
SMALL_TESTS = """
import model


def test_model(cudagraph):
    pass
"""

OPTIONS = ("--cudagraph", "--cudagraph-device=cpu", "--cudagraph-batch-sizes=1", "--cudagraph-base")


class Repository:
    """A git repository of a model, its test and a conftest."""

    def __init__(self, path, conftest="import model\n", tests=SMALL_TESTS, model=""):
        self.path, self.model = path, model
        (path / "conftest.py").write_text(conftest)
        (path / "test_user.py").write_text(tests)
        self.git("init", "--quiet")

    def git(self, *arguments):
        identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
        command = ["git", "-C", str(self.path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commit(self, **numbers):
        self.write(**numbers)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "a commit")

    def write(self, **numbers):
        (self.path / "model.py").write_text(self.model.format(**numbers))

    def worktrees(self):
        return self.git("worktree", "list").splitlines()


@pytest.fixture
def repository(project):
    made = Repository(project.path)
    made.run, made.pytester = project.run, project.pytester
    return made


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """One run for all that a comparison shows."""
    repository = Repository(tmp_path_factory.mktemp("repository"), CONFTEST, TESTS + MORE_TESTS, MODEL)
    (repository.path / ".gitignore").write_text("weights.bin\n__pycache__\n")
    repository.commit(cost_ns=10_000_000)
    repository.commit(cost_ns=10_500_000)
    repository.write(cost_ns=11_000_000)
    (repository.path / "weights.bin").touch()
    folder = repository.path / "later"
    folder.mkdir()
    (folder / "test_later.py").write_text(TESTS.replace("test_model", "test_later"))
    command = [sys.executable, "-m", "pytest", *OPTIONS, "HEAD~1", "--rootdir=..", ".."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return repository, pytest.LineMatcher(done.stdout.splitlines())


@pytest.mark.slow
def test_a_planted_slowdown_of_ten_percent_in_the_working_tree_fails_and_both_sides_are_shown(comparison):
    _, shown = comparison
    shown.fnmatch_lines(
        [
            "E*SlowerThanBase: batch 1: replay is 10 % slower than in HEAD~1 (*)*, 99% interval *; allowed is 5.0 %",
            "E*base -> head: replay 10.0 -> 11.0 ms, lower quartiles in 2 pairs of processes, in turn",
            "replay at HEAD~1 (*) (base) and in the working tree (head); lower quartiles of processes*",
            "test*batch*base*head*change*kernels*verdict",
            "test_user.py::test_model*1*10.0 ms*11.0 ms*+10 %*1*slower",
            "* 1 failed, 3 passed*",
        ]
    )


@pytest.mark.slow
def test_a_comparison_leaves_no_worktree_and_no_baseline(comparison):
    repository, _ = comparison
    assert len(repository.worktrees()) == 1
    assert not list(repository.path.rglob(".cudagraph"))


@pytest.mark.slow
def test_a_test_without_a_slowdown_passes(comparison):
    _, shown = comparison
    shown.fnmatch_lines(["test_user.py::test_steady*1*10.0 ms*10.0 ms*+0.0 %*1*passed"])


@pytest.mark.slow
def test_a_new_test_in_a_folder_that_the_base_lacks_is_called_new(comparison):
    _, shown = comparison
    shown.fnmatch_lines(["later/*::test_later * - * passed", "  new: not in the base"], consecutive=True)


@pytest.mark.slow
def test_a_test_that_the_base_has_and_could_not_measure_is_not_called_new(comparison):
    _, shown = comparison
    shown.fnmatch_lines(["test_user.py::test_weights * - * not judged", "  failed in the base"], consecutive=True)


_PATIENCE_S = 120
"""Of no meaning but that a broken test ends."""


def _told_number(pipe):
    """What a process writes into the pipe, waited for."""
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert select.select([end], [], [], _PATIENCE_S)[0], "no process of the base has begun"
        return int(os.read(end, 100))
    finally:
        os.close(end)


def test_ctrl_c_leaves_no_worktree_and_no_process(repository):
    told = repository.path / "told"
    os.mkfifo(told)
    # Each process of the base says its number, and then waits until it is stopped.
    repository.pytester.makeconftest(
        f"""
import os, signal

if "pytest-cudagraph-" in __file__:
    with open({str(told)!r}, "w") as pipe:
        pipe.write(str(os.getpid()))
    while True:
        signal.pause()
"""
    )
    repository.commit()
    command = [sys.executable, "-m", "pytest", *OPTIONS, "HEAD"]
    run = subprocess.Popen(
        command,
        cwd=repository.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs these tests in the background may have them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        process = _told_number(told)
        assert len(repository.worktrees()) == 2
        os.kill(run.pid, signal.SIGINT)
        said, _ = run.communicate(timeout=_PATIENCE_S)
    finally:
        run.kill()
    assert run.returncode == pytest.ExitCode.INTERRUPTED, said
    assert len(repository.worktrees()) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-branch",), "*--cudagraph-base: a branch, tag or commit of this repository is allowed; found*"),
        (("HEAD", "-n", "2"), "*--cudagraph-base measures in processes of its own, one at a time: run without -n*"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(repository, arguments, message):
    repository.commit()
    result = repository.run(*OPTIONS, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert "Traceback" not in result.stderr.str()


def test_a_base_that_cannot_run_its_tests_is_a_usage_error_with_their_words(repository):
    repository.commit()
    (repository.path / "model.py").write_text("raise RuntimeError('not generated yet')\n")
    repository.git("commit", "--quiet", "--all", "--message", "broken")
    repository.write()
    result = repository.run(*OPTIONS, "HEAD")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--cudagraph-base: the base, HEAD (*), could not be measured: *", "*RuntimeError: not generated yet"]
    )


def test_a_base_whose_tests_cannot_be_collected_is_a_usage_error_with_their_words(repository):
    repository.pytester.makepyfile(test_user=f"import generated\n{SMALL_TESTS}")
    (repository.path / ".gitignore").write_text("generated.py\n")
    repository.commit()
    (repository.path / "generated.py").touch()
    result = repository.run(*OPTIONS, "HEAD")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "*--cudagraph-base: the base, HEAD (*), could not be measured: pytest ended with exit code 2 and could not "
            "collect test_user.py. The end of its output:",
            "*ModuleNotFoundError: No module named 'generated'",
        ]
    )
    assert len(repository.worktrees()) == 1


def test_a_root_directory_above_the_repository_is_a_usage_error(repository):
    repository.commit()
    above = repository.path.parent
    result = repository.run(*OPTIONS, "HEAD", f"--rootdir={above}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"*--cudagraph-base: pytest's root directory must not lie above the repository, {repository.path}; "
            f"found {above}",
            f"  a checkout has no such folder around it, and its tests would be named otherwise: "
            f"--rootdir={repository.path}",
        ]
    )


def test_a_base_without_pytests_root_directory_is_a_usage_error_of_one_line(repository, monkeypatch):
    repository.commit()
    folder = repository.path / "part"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = ..\n")
    (folder / "test_part.py").write_text(SMALL_TESTS)
    monkeypatch.chdir(folder)
    result = repository.run(*OPTIONS, "HEAD")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = [line for line in result.errlines if line.strip()]
    assert told[-1].startswith("ERROR: --cudagraph-base: the base, HEAD (")
    assert told[-1].endswith("does not have pytest's root directory, part: none of its tests can be measured there")


def test_code_of_the_working_tree_in_the_base_is_a_usage_error(repository):
    repository.commit()
    # What an editable install does, done where nothing can stand before it.
    ahead = f"import sys\nsys.path.insert(0, {str(repository.path)!r})\n"
    (repository.path / "conftest.py").write_text(ahead + "import model\n")
    repository.git("commit", "--quiet", "--all", "--message", "editable")
    result = repository.run(*OPTIONS, "HEAD")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*must import its own code; found 1 of the working tree's files*first model.py"])


def test_without_the_plugins_switch_nothing_is_compared(repository):
    repository.commit()
    result = repository.run("--cudagraph-base", "HEAD")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["cudagraph: without --cudagraph nothing is measured or written: --cudagraph-base"])

"""Random wrong uses, kills at random moments and concurrent writers: no internal error, and nothing is lost.

Takes ten minutes and more: ``pytest -m nightly tests/plugin/test_attacks.py -s``. The seeds are fixed, so a failure
comes again. Only the moment of a kill depends on the machine.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from tests.plugin.conftest import MODELS
from tests.plugin.test_hostile_values import HOSTILE

from pytest_cudagraph.baseline import read

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")]

WRONG_USES, KILLS, ROUNDS, WRITERS = 200, 60, 5, 8

RANDOM_USES = """
import random
import pytest
from models import *

ODD = [
    None, 0, -1, 1, 2, 10**30, 1.5, 0.01, float("nan"), float("inf"), True, "", "x", "1,2", "\\ud800\\x1b[2J", b"x",
    (), [], [1, 1], [1, 2], ["1"], {}, {1: 1.1}, {"1": 1.1}, {1: None}, X, Hostile(), Hostile, HostileModel(), looped(),
]
MODELS = [
    Mlp().eval(), ReadsTheHost().eval(), BakesItsStep().eval(), WrongUnderCapture().eval(), HoldsBoth(), raises,
    resizes, HostileModel(), Hostile(), Mlp, None, 3, "model", lambda: X, lambda x: None, lambda x: looped(),
    lambda x: fake(), lambda *args: Hostile(), lambda x: x.to_sparse(), lambda x: (row for row in x), lambda x: 1 / 0,
]
INPUTS = [
    (X,), (X,), (X,), (X.double(),), (X[:0],), (X.to("meta"),), (X.to_sparse(),), (fake(),), (torch.tensor(1.0),),
    (looped(),), (deep(),), (Hostile(),), (X, X), (), (3,), (X, Hostile()), ({Hostile(): X},), (iter([X]),),
]
NAMES = "batch_sizes batch_dim compile min_speedup max_slowdown rtol atol name kwargs mode scale".split()

@pytest.mark.parametrize("seed", range(COUNT))
def test_use(seed, cudagraph, compile_model, capture_graphs, measure_speedup, assert_replay_close, perf_monitor):
    rng = random.Random(seed)
    pick = rng.choice
    options = {pick(NAMES): pick(ODD) for _ in range(rng.randrange(3))}
    options.setdefault("batch_sizes", [1])
    later = [measure_speedup, assert_replay_close]
    use = pick([cudagraph, cudagraph, cudagraph, compile_model, capture_graphs, perf_monitor, *later])
    if use in later:
        options.pop("batch_sizes")
        given = pick([Hostile(), None, 3, lambda: capture_graphs(Mlp().eval(), X, batch_sizes=[1])])
        use(given() if type(given) is type(raises) else given, **options)
    elif use is perf_monitor:
        perf_monitor(**{pick(["every_s", "clock", "other"]): pick(ODD)})
    else:
        use(pick(MODELS), *pick(INPUTS), **options)
"""


def test_random_wrong_uses_are_the_users_error_or_one_of_ours(project):
    project.pytester.makepyfile(models=MODELS + HOSTILE, test_user=RANDOM_USES.replace("COUNT", str(WRONG_USES)))
    options = ("--cudagraph-json=run.json", "--junitxml=junit.xml", "--cudagraph-time-budget=0.2", "--tb=short", "-q")
    result = project.measure(*options, "--cudagraph-update", "-p", "no:cacheprovider")
    shown = result.stdout.str() + result.stderr.str()
    print(f"{WRONG_USES} wrong uses: {result.parseoutcomes()}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert [line for line in shown.splitlines() if "INTERNALERROR" in line or "pytest_cudagraph/" in line] == []
    assert "\x1b" not in shown
    json.loads((project.path / "run.json").read_text(encoding="utf-8"))
    assert (project.path / "junit.xml").is_file()


GOOD = """
import torch


def test_good(cudagraph):
    cudagraph(torch.nn.ReLU(), torch.randn(1, 4), min_speedup=0.0001, name="{name}")
"""
CPU_TIME = """
import time
from pytest_cudagraph.measure import PerfCounterClock

# Other runs decide nothing then.
PerfCounterClock.now_ns = PerfCounterClock.cpu_time_ns = staticmethod(lambda: 10 * time.thread_time_ns())
"""
COMMAND = [
    sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cudagraph", "--cudagraph-device=cpu",
    "--cudagraph-time-budget=1", "--cudagraph-batch-sizes=1", "--cudagraph-max-slowdown=inf", "--cudagraph-update=all",
]  # fmt: skip


def start(folder, *options):
    return subprocess.Popen(
        [*COMMAND, *options], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture
def runs(project):
    """A project whose tests measure the CPU time of their thread."""
    project.pytester.makeconftest(CPU_TIME)
    return project


def test_a_kill_at_any_moment_leaves_each_file_whole(runs):
    (runs.path / "test_user.py").write_text(GOOD.format(name="good"), encoding="utf-8")
    options = ("--cudagraph-json=run.json", "test_user.py")
    began_s = time.monotonic()
    process = start(runs.path, *options)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    whole_s, rng, ends = time.monotonic() - began_s, random.Random(0), Counter()
    for number in range(KILLS):
        process = start(runs.path, *options)
        try:
            # Half of the kills come in the last tenth, in which files are written.
            process.wait(whole_s * (rng.uniform(0.9, 1.05) if number % 2 else rng.random()))
        except subprocess.TimeoutExpired:
            process.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT]))
        output, _ = process.communicate()
        ends[process.returncode] += 1
        assert "INTERNALERROR" not in output
        assert [name for name, _ in read(runs.baseline).entries] == ["good"]
        assert json.loads((runs.path / "run.json").read_text(encoding="utf-8"))["schema"] == 1
    print(f"{KILLS} kills of runs of {whole_s:.1f} s: exit codes {dict(ends)}")
    process = start(runs.path, *options)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    left = [path.name for path in runs.path.glob(".cudagraph/.*.tmp")]
    assert left == []


def test_concurrent_writers_lose_no_entry(runs):
    for number in range(WRITERS):
        name = f"entry {number}"
        (runs.path / f"test_{number}.py").write_text(GOOD.format(name=name), encoding="utf-8")
    for round_number in range(ROUNDS):
        running = [start(runs.path, f"test_{number}.py", "--cudagraph-json=run.json") for number in range(WRITERS)]
        outputs = [process.communicate()[0] for process in running]
        assert [process.returncode for process in running] == [0] * WRITERS, "\n".join(outputs)
        assert [name for name, _ in read(runs.baseline).entries] == [f"entry {number}" for number in range(WRITERS)]
        assert json.loads((runs.path / "run.json").read_text(encoding="utf-8"))["schema"] == 1
        print(f"round {round_number + 1} of {ROUNDS}: {WRITERS} writers, {WRITERS} entries")
        runs.baseline.unlink()

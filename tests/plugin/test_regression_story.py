"""A baseline over the life of a model: what it detects, that it accepts nothing by itself, and what stays undecided.

The test sets how long eager and replay take, so that 20 % are 20 % on any machine.
"""

from __future__ import annotations

import json
import re

import pytest

CLOCK = """
import dataclasses, random
import models
from pytest_cudagraph.measure import measure_arms
from pytest_cudagraph.pipeline import open_device_context
from pytest_cudagraph.pipeline.device_context import Readings
from pytest_cudagraph.session.state_keys import DEVICE_CONTEXTS, SETTINGS


class Clock:
    '''Only the timed calls advance it.'''

    resolution_ns = 1.0
    ns = 0

    def now_ns(self):
        return Clock.ns

    cpu_time_ns = now_ns


class Reference:
    def readings(self):
        return Readings(lambda: 150e3)


def measure_by_the_model(arms, **options):
    jitter, model = random.Random(0), models.Timed.latest

    def lasting(call, microseconds):
        def timed():
            Clock.ns += int(microseconds * 1000 * jitter.uniform(0.998, 1.002))
            return call()

        return timed

    eager, replay = lasting(arms.eager, model.eager_us), lasting(arms.replay, model.replay_us)
    return measure_arms(dataclasses.replace(arms, eager=eager, replay=replay), **options)


def pytest_sessionstart(session):
    stash = session.config.stash
    option = stash[SETTINGS].device
    opened = open_device_context(option, stash[SETTINGS])
    stash[DEVICE_CONTEXTS][option] = dataclasses.replace(
        opened, clock=Clock(), reference=Reference(), measure=measure_by_the_model
    )
"""

TIMED = """
class Timed(Mlp):
    def __init__(self, eager_us, replay_us):
        super().__init__()
        self.eager_us, self.replay_us = eager_us, replay_us
        Timed.latest = self
"""


@pytest.fixture
def timed(project):
    with (project.path / "conftest.py").open("a", encoding="utf-8") as file:
        file.write(CLOCK)
    with (project.path / "models.py").open("a", encoding="utf-8") as file:
        file.write(TIMED)
    return project


def write(timed, replay_us, eager_us=120):
    call = f"cudagraph(Timed({eager_us}, {replay_us}).eval(), torch.randn(1, 16), batch_sizes=[1])"
    timed.write(good=call, other=call.replace(str(replay_us), "60"))


def run(timed, *options):
    return timed.run("--cudagraph", "--cudagraph-device=cpu", *options)


def said(result):
    """The failure's message without the line of the device."""
    return [line[4:] for line in result.outlines if line.startswith("E ") and "cpu: " not in line]


def test_a_baseline_through_the_life_of_a_model(timed):
    write(timed, replay_us=60)
    recorded = run(timed, "--cudagraph-update")
    recorded.assert_outcomes(passed=2)
    recorded.stdout.fnmatch_lines(["2 passed, 2 new", "wrote 2 entries to *"])
    text = timed.baseline.read_text(encoding="utf-8")

    write(timed, replay_us=72)
    for _ in range(2):  # twice: a regression that was caught must not bless itself
        slower = run(timed)
        slower.assert_outcomes(failed=1, passed=1)
        slower.stdout.fnmatch_lines(
            [
                "E *SlowerThanBaseline: batch 1: replay is 20 % slower than the baseline "
                "(median 60.0 -> 72.0 µs); this test allows 10 %",
                "E * eager did not change (120.0 -> 120.0 µs), replay got slower than in the baseline "
                "(60.0 -> 72.0 µs); replay alone: what is captured, not the model",
                "E * 90% interval +12 % to +29 %, from 1 saved session (3.0 % between sessions is assumed)",
                "E * to accept: pytest *::* --cudagraph --cudagraph-device=cpu --cudagraph-update",
                "1 passed, 1 slower",
            ]
        )
        assert timed.baseline.read_text(encoding="utf-8") == text

    write(timed, replay_us=60)
    fixed = run(timed, "--cudagraph-strict")
    fixed.assert_outcomes(passed=2)
    fixed.stdout.fnmatch_lines(["2 passed"])

    write(timed, replay_us=50)
    faster = run(timed)
    faster.assert_outcomes(passed=2)
    faster.stdout.fnmatch_lines(
        ["2 passed, 1 faster", "faster: test_user.py::test_good, batch 1: replay is 20 % faster *"]
    )
    assert (
        "to keep the gain: pytest test_user.py::test_good --cudagraph --cudagraph-device=cpu --cudagraph-update"
        in " ".join(line.strip() for line in faster.outlines)
    )
    assert timed.baseline.read_text(encoding="utf-8") == text

    timed.write(other="cudagraph(Timed(120, 60).eval(), torch.randn(1, 16), batch_sizes=[1])")
    gone = run(timed)
    assert gone.ret == pytest.ExitCode.OK
    gone.stdout.fnmatch_lines(["1 passed, 1 stale", "stale: test_user.py::test_good, batch 1"])
    assert run(timed, "--cudagraph-strict").ret == pytest.ExitCode.TESTS_FAILED

    name = next(iter(re.findall(r'"name": "([^"]+)",\n\s+"platform"', text)))
    timed.baseline.unlink()
    (timed.path / ".cudagraph" / "another.json").write_text(text.replace(name, "Another Machine"), encoding="utf-8")
    elsewhere = run(timed)
    elsewhere.assert_outcomes(passed=1)
    elsewhere.stdout.fnmatch_lines(["1 not judged, 1 not comparable"])
    strict = run(timed, "--cudagraph-strict")
    strict.assert_outcomes(failed=1)
    assert "the baseline is of Another Machine" in strict.stdout.str()


def test_a_marginal_slowdown_is_inconclusive_until_sessions_tell(timed):
    write(timed, replay_us=60)
    for _ in range(5):
        run(timed, "--cudagraph-update").assert_outcomes(passed=2)
    write(timed, replay_us=65)
    told = run(timed)
    told.assert_outcomes(passed=2)
    told.stdout.fnmatch_lines(["2 passed"])  # 8.3 % slower, and five sessions that agree know that it is below 10 %

    document = json.loads(timed.baseline.read_text(encoding="utf-8"))
    for record in document["benchmarks"]:
        history = record["extra_info"]["cudagraph"].get("sessions", [])
        assert len(history) in (0, 5)
        del history[1:]
    timed.baseline.write_text(json.dumps(document), encoding="utf-8")
    open_ = run(timed)
    open_.assert_outcomes(passed=2)
    open_.stdout.fnmatch_lines(
        [
            "*InconclusiveWarning: batch 1: cannot tell whether replay is slower than the baseline: +8.3 % *",
            "1 passed, 1 inconclusive",
        ]
    )


def test_what_changed_is_replaced_and_counted_and_what_holds_gets_a_session(timed):
    write(timed, replay_us=60)
    run(timed, "--cudagraph-update")
    write(timed, replay_us=72)
    accepted = run(timed, "--cudagraph-update")
    accepted.assert_outcomes(passed=2)
    said = "accepted: test_user.py::test_good, batch 1: replay 60.0 -> 72.0 µs (+20 %)"
    accepted.stdout.fnmatch_lines(["2 passed, 1 changed", said, "wrote 2 entries to *"])
    records = json.loads(timed.baseline.read_text(encoding="utf-8"))["benchmarks"]
    counts = {each["name"]: len(each["extra_info"]["cudagraph"].get("sessions", [])) for each in records}
    assert (counts["test_good[1-replay]"], counts["test_other[1-replay]"]) == (1, 2)
    run(timed, "--cudagraph-strict").assert_outcomes(passed=2)

    run(timed, "--cudagraph-update=all").stdout.fnmatch_lines(["2 passed, 2 changed"])
    assert timed.baseline.read_text(encoding="utf-8").count('"commit": ') == 2


def test_a_missing_entry_is_counted_and_refused_by_strict(timed):
    write(timed, replay_us=60)
    result = run(timed)
    result.stdout.fnmatch_lines(["2 passed, 2 no baseline yet"])
    strict = run(timed, "--cudagraph-strict", "--cudagraph-json=run.json")
    strict.assert_outcomes(failed=2)
    strict.stdout.fnmatch_lines(
        [
            "E *NotProven: batch 1: not compared: no entry in .cudagraph/cpu-*.json yet; "
            "--cudagraph-strict asks for one",
            "E *to save one: pytest --cudagraph --cudagraph-device=cpu --cudagraph-update",
            "test_user.py::test_good * no baseline yet",
            "2 no baseline yet",
            "not compared: no entry in .cudagraph/cpu-*.json yet; *",
        ]
    )
    found = [batch for test in json.loads((timed.path / "run.json").read_text())["tests"] for batch in test["batches"]]
    assert [(batch["verdict"], batch["word"]) for batch in found] == [("not-judged", "no baseline yet")] * 2


def test_the_markers_that_were_measured_are_suggested(timed):
    timed.write(
        good="cudagraph(Timed(120, 50).eval(), torch.randn(1, 16), batch_sizes=[1], name='at1')\n"
        "cudagraph(Timed(120, 80).eval(), torch.randn(1, 16), batch_sizes=[2], name='at2')",
        same="cudagraph(Timed(120, 60).eval(), torch.randn(1, 16), batch_sizes=[1, 2])",
        slow="cudagraph(Timed(120, 119).eval(), torch.randn(1, 16), batch_sizes=[1])",
        wrong="cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16), batch_sizes=[1])",
    )
    result = run(timed, "--cudagraph-suggest")
    result.stdout.fnmatch_lines(
        [
            "suggest: at1: @pytest.mark.graph_speedup(min=2.30)",
            "suggest: at2: @pytest.mark.graph_speedup(min=1.45)",
            "suggest: test_user.py::test_same: @pytest.mark.graph_speedup(min=1.90)",
            "suggest: test_user.py::test_slow: @pytest.mark.graph_speedup(min=0.95)",
            "suggest: test_user.py::test_wrong: nothing, for it is wrong",
        ]
    )


def test_a_rehearsal_suggests_nothing(timed):
    write(timed, replay_us=60)
    result = timed.run("--cudagraph", "--cudagraph-suggest")
    result.stdout.fnmatch_lines(["suggest: test_user.py::test_good: nothing, for speed is not judged: *"])

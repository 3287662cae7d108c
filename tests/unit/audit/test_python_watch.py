"""Warnings name what equal calls cannot show, at the line of the condition or of the read, and nothing else."""

from __future__ import annotations

import sys
import time
from datetime import date
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.audit.test_audit import audited
from torch import nn

MODULE = """\
from datetime import datetime
CALLS = [0]
STEPS = 0
def work(self, x):
    {line}
    return x * 2
"""


def warned(line, tmp_path, *, folder="project"):
    """The ids and lines of the warnings about a model whose only own line in ``forward`` is this one."""
    path = tmp_path / folder / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODULE.format(line=line), encoding="utf-8")
    names = {"__name__": "model"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)

    class Moves(nn.Module):
        calls, level, other = 0, 0, SimpleNamespace(calls=3)

        def __init__(self):
            super().__init__()
            self.inner = SimpleNamespace(steps=0)
            self.seen = []

        def forward(self, x):
            self.calls += 1
            self.inner.steps -= 1
            self.seen.append(1)
            names["CALLS"][0] += 1
            names["STEPS"] += 1
            return names["work"](self, x)

    found = audited(Moves()).findings
    return [(each.id, each.site.line) for each in found if each.level == "warning" and each.site.file == str(path)]


@pytest.mark.parametrize(
    "line",
    [
        "if self.calls == 1000: x = x + 1",
        "x = x + 1 if self.inner.steps > 1000 else x",
        "while len(self.seen) > 1000: self.seen.pop()",
        "count = int(self.calls) % 1000; self.level = 0 if count else 1",
        "if CALLS[0] > 1000 and x.shape[0]: x = x + 1",
        "if STEPS > 1000: x = x + 1",
    ],
)
def test_a_condition_on_what_moves_with_each_call_is_a_warning_at_its_line(line, tmp_path):
    assert warned(line, tmp_path) == [("control-flow", 5)]


@pytest.mark.parametrize(
    "line",
    [
        "if self.level == 1000: x = x + 1",
        "if self.other.calls == 1000: x = x + 1",
        "calls = x.shape[0]; x = x + 1 if calls == 1000 else x",
        "y = x.roll(0 * self.calls); x = y if y.shape[0] else x",
        "self.level = self.calls > 1000",
        "if False: x = datetime.now()",
        "str(datetime(2020, 1, 1))",
    ],
)
def test_what_stays_and_what_decides_nothing_is_none(line, tmp_path):
    assert warned(line, tmp_path) == []


def test_a_read_of_the_date_is_a_warning_in_the_project_and_in_a_library_that_computes(tmp_path):
    assert warned("datetime.now()", tmp_path) == [("baked-scalar", 5)]
    assert warned("datetime.now()", tmp_path, folder="site-packages/net") == [("baked-scalar", 5)]


def test_a_library_that_computes_nothing_may_read_the_date(tmp_path):
    path = tmp_path / "site-packages" / "progress" / "bar.py"
    path.parent.mkdir(parents=True)
    path.write_text("import time\ndef show(n=[0]):\n    n[0] += 1\n    return time.ctime() if n[0] else n\n")
    names = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)

    def model(x):
        names["show"]()
        return x * 2

    assert audited(model).findings == ()


def test_the_present_time_is_told_from_the_conversion_of_another(tmp_path):
    def model(x):
        given = time.strftime("%H", time.gmtime(0)), time.ctime(0), date.fromtimestamp(0)
        return x * 2 if given else x * (time.strftime("%H") < "12", date.today())[0]

    assert audited(model).findings == ()
    (finding,) = audited(lambda x: x * date.today().day).findings
    assert (finding.level, finding.evidence.rpartition(": ")[2]) == ("warning", "date.today reads the clock")


def test_a_profiler_keeps_its_hook_and_nothing_else_does(tmp_path):
    def profiler(frame, event, arg):
        return None

    def model(x):
        return x * date.today().day

    sys.setprofile(profiler)
    try:
        found = audited(model)
        assert found.findings == ()
        assert found.not_judged == ("branches on moving Python values, reads of the date: a profiler runs",)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert len(audited(model).findings) == 1
    assert sys.getprofile() is None


def test_a_call_that_differs_once_is_told_although_its_repetition_does_not():
    class SixthCall(nn.Module):
        n = np.zeros(1)  # is restored by no snapshot

        def forward(self, x):
            self.n += 1
            return x * 2.0 if self.n[0] == 6 else x + 1

    warned = [found for found in audited(SixthCall()).findings if found.level == "warning"]
    assert [found.id for found in warned] == ["control-flow"]
    assert "its repetition did not" in warned[0].evidence

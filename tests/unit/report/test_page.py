"""The HTML page of a run: what it says, that it is one file, and that no name in it can act."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.facts import (
    CPU,
    H200,
    batch,
    generation,
    guided,
    judgement,
    latency,
    lookup,
    modes,
    prefill,
    report,
    saved,
    sessions,
    timing,
)

from pytest_cudagraph.base_revision.judge import base_tables
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.report import WorkloadTest, document, json_text, run_of_document, run_tables
from pytest_cudagraph.report import page as page_of_run
from pytest_cudagraph.values import (
    Addition,
    BaseComparison,
    Column,
    Finding,
    Interval,
    NoBaseline,
    Site,
    Table,
    Verdict,
)

ROOT = "/home/user/project"
COMMIT = {"id": "1a2b3c4d5e6f", "branch": "main", "dirty": True}


def added(test="tests/test_gen.py::test_gen", name="decode"):
    """What a feature adds to a run: an entry, lines of the summary, a table."""
    columns = (Column(title="", right=False), Column(title="name", right=False), Column(title="calls"))
    table = Table(title="monitored calls", columns=columns, rows=((test, name, "120"),), in_terminal=False)
    return Addition(nodeid=test, key="calls", entry={"name": name, "calls": 120}, tables=(table,))


WORKLOADS = [
    WorkloadTest(nodeid="tests/test_a.py::test_mlp", group="heads", name="mlp"),
    WorkloadTest(nodeid="tests/test_a.py::test_gpt", group="heads", name="gpt"),
    WorkloadTest(nodeid="tests/test_c.py::test_gone", group="heads", name="gone", error="MemoryError: no room"),
]


def story():
    """A run with each verdict, each kind of plot and each section."""
    quiet = saved(sessions=sessions(60.0, 60.6, 59.4, 60.3, 59.7, reference_us=100.0))
    slower = judgement(
        Verdict.FAILED,
        gate="baseline",
        reason="replay is 15 % slower than the baseline",
        evidence=("eager did not change", "compared with 5 saved sessions"),
        remedy="to accept: --cudagraph-update",
    )
    held = replace(timing(150.0, 69.0, 90.0), reference=latency(100.0), busy_ns=50_000.0, discarded=3)
    scalar = Finding(
        id="baked-scalar",
        level="error",
        message="a number is baked in",
        fix="pass a tensor",
        evidence="`return x * self.scale`: 0.25, then 0.125",
        site=Site(file=f"{ROOT}/model.py", line=12, function="forward"),
        called_from=Site(file=f"{ROOT}/tests/test_model.py", line=4),
    )
    note = Finding(id="rng", level="note", message="draws random numbers", fix="none needed", accepted="seeded")
    wrong = judgement(Verdict.WRONG, gate="check", reason="replay differs from eager in output[0]", remedy="fix it")
    unproven = replace(batch().agreement, warnings=("all outputs are zero",), notes=("drawn",), not_compared=("Cache",))
    against = BaseComparison(
        revision="main (1a2b3c4)", base_replay_ns=(60e3, 61e3, 60.5e3), head_replay_ns=(66e3, 67e3, 66.5e3),
        change=Interval(estimate=1.1, low=1.08, high=1.12),
    )  # fmt: skip
    return [
        report("tests/test_a.py::test_mlp", batch(1, base=against), batch(8, slower, baseline=quiet, timing=held)),
        report("tests/test_a.py::test_gpt", batch(8, wrong), findings=(scalar, note), compile_mode="inductor"),
        replace(report("tests/test_b.py::test_host"), batches=(), judgements=(
            judgement(Verdict.NOT_CAPTURED, gate="audit", reason="the host waits for the device"),), findings=(note,)),
        report("tests/test_b.py::test_busy", batch(1, judgement(Verdict.INCONCLUSIVE, reason="not decided")),
               gpu="GPU-1a2b"),
        report("tests/test_b.py::test_new", batch(1, judgement(
            Verdict.NOT_JUDGED, gate="baseline", reason="not compared: nothing is saved"), comparison="new",
            baseline=NoBaseline(comparison="new", reason="nothing is saved"), agreement=unproven)),
        report("tests/test_gen.py::test_gen", batch(8, scenario=generation()),
               batch(2, scenario=prefill(), timing=None), batch(4, scenario=lookup(), timing=None),
               batch(5, scenario=guided(), timing=None),
               batch(6, scenario=modes(), speedup=modes().speedup, timing=None),
               not_judged=("mylib::op",), notes=("training mode",)),
    ]  # fmt: skip


def written(reports, device=H200, settings=None, additions=(), workloads=()):
    """A document as it is read from its file."""
    facts = {"rootdir": ROOT} | (settings or {})
    tables = run_tables(reports, base_tables(reports), additions, workloads, facts)
    plain = document(
        reports, device, facts, additions, workloads, tables=tables, date="2026-11-22T10:00:00+00:00", commit=COMMIT
    )
    return json.loads(json_text(plain))


def page(plain):
    return page_of_run(run_of_document(plain))


class _Parsed(HTMLParser):
    """The text of a page as a person reads it, a line per block, and its tags with their attributes."""

    BLOCKS = frozenset("h1 h2 p li tr details summary figure div dt option title".split())
    UNSEEN = frozenset(("style", "script", "svg"))

    def __init__(self, text):
        super().__init__()
        self.lines, self.unseen, self.tags = [""], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.unseen += tag in self.UNSEEN
        if tag in self.BLOCKS:
            self.lines.append("")
        self.lines[-1] += " | " if tag in ("td", "th") else " " if tag in ("code", "dd") else ""

    def handle_endtag(self, tag):
        self.unseen -= tag in self.UNSEEN

    def handle_data(self, text):
        if not self.unseen:
            self.lines[-1] += text


def shown(text):
    lines = (
        re.sub(r"[ |]*\s+", lambda gap: " | " if "|" in gap.group() else " ", line) for line in _Parsed(text).lines
    )
    return "\n".join(line for each in lines if (line := each.strip(" |"))) + "\n"


def test_the_page_reads_as_reviewed(golden):
    golden("report/page.txt", shown(page(written(story(), additions=[added()], workloads=WORKLOADS))))


def test_a_page_of_the_twin_names_its_device_and_a_run_without_tests_says_so():
    text = shown(page(written([], CPU)))
    assert "cpu: AMD EPYC 9B45, torch 2.13.0+cpu" in text
    assert "nothing measured" in text


HOSTILE = [
    "<script>alert(1)</script>",
    "\"' onmouseover=alert(1) x='",
    "</style></script><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[31mred\x1b[0m\x00\u202egnp.exe",
]


@pytest.mark.parametrize("name", HOSTILE, ids=["script", "quotes", "tags", "template", "escapes"])
def test_foreign_text_stays_text_wherever_it_stands(name):
    bad = judgement(Verdict.FAILED, reason=name, evidence=(name,), remedy=name, hazard=name)
    unjudged = judgement(Verdict.NOT_JUDGED, reason=name)
    finding = Finding(id=name, level="error", message=name, fix=name, evidence=name, site=Site(file=name, line=1))
    agreement = replace(batch().agreement, warnings=(name,), notes=(name,), not_compared=(name,))
    own = batch(8, bad, unjudged, agreement=agreement)
    told = report(name, own, findings=(finding,), not_judged=(name,), notes=(name,))
    found = written([told], replace(H200, name=name), {name: name}, [added(name, name)])
    found["commit"]["branch"] = name
    text = page(found)

    parsed = _Parsed(text)
    assert {tag for tag, _ in parsed.tags} & {"img", "iframe"} == set()
    assert sum(tag == "script" for tag, _ in parsed.tags) == 1
    assert not [key for _, attributes in parsed.tags for key in attributes if key.startswith("on")]
    assert not re.search("[\x00\x1b\u202e]", text)
    assert re.sub("[\x00\x1b\u202e]", "?", name) in "".join(parsed.lines)


def test_the_page_is_one_file_whose_policy_allows_its_own_script_and_style_only():
    text = page(written(story()))
    targets = [each[key] for _, each in _Parsed(text).tags for key in ("src", "href") if key in each]
    assert {target[0] for target in targets} == {"#", "d"}
    assert "://" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; ")
    for kind in ("style", "script"):
        (inline,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def many(count):
    entry = saved(sessions=sessions(*[60.0] * 10, reference_us=100.0))
    timed = replace(timing(120.0, 60.0, 80.0), reference=latency(100.0), busy_ns=50_000.0)
    sizes = [batch(size, timing=timed, baseline=entry) for size in (1, 2, 4, 8)]
    return [report(f"tests/serving/test_models_{at}.py::test_model[float16-{at}]", *sizes) for at in range(count)]


def test_a_hundred_rows_stay_below_500_kb_and_failures_are_unfolded():
    text = page(written([*many(24), *story()]))
    assert len(text.encode()) < 500_000
    assert text.count(" open><summary>") == 3
    assert "rows, folded" not in text


def test_a_large_page_is_folded():
    text = page(written([*many(101), *story()]))
    assert " open><summary>" not in text
    assert "415 rows, folded" in text


def test_what_a_later_version_added_is_left_out():
    found = written(story())
    for each in (each for test in found["tests"] for each in test["batches"]):
        each["of_the_future"] = {"a": 1}
    assert page(found | {"of_the_future": [1]}) == page(written(story()))


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found.pop("settings"),
        lambda found: found.update(commit=[1]),
        lambda found: found["tests"][1]["findings"].append(3),
        lambda found: found["tests"][0]["batches"][0].update(kernels={}, noise_ratio="<script>"),
        lambda found: found["tests"][0]["batches"][1]["baseline"]["sessions"].append({}),
        lambda found: found["tests"][0]["batches"][1]["baseline"]["sessions"][0].update(unrest_log=1e9),
        lambda found: found["tables"][0]["rows"][0].append("one more"),
    ],
)
def test_a_damaged_document_gives_no_page(edit):
    found = written(story())
    edit(found)
    with pytest.raises(ValueError, match="damaged"):
        page(found)


def test_without_jinja2_one_sentence_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **rest):
        if name.startswith("jinja2"):
            raise ModuleNotFoundError("No module named 'jinja2'")
        return real(name, *arguments, **rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CudagraphError, match=r"needs jinja2 .*: pip install 'pytest-cudagraph\[html\]'"):
        page(written([report("a", batch(8, timing=None))]))

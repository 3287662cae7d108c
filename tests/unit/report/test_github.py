"""What GitHub shows of a run: failures first, any name as text, never more than it takes."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from tests.facts import CPU, batch, judgement, report, saved, timing
from tests.unit.report.test_failure import WRONG
from tests.unit.report.test_table import story

from pytest_cudagraph.report import annotation, sites_of_failure, step_summary
from pytest_cudagraph.values import Finding, Site, Verdict

HOSTILE = "a|b`c`\n# d <script>alert(1)</script> ::error::e %0A \x1b[2J\udc80 </pre>"
ROOMY = 1 << 20


def summary_of(reports, closing=("2 passed, 1 slower",), room_bytes=ROOMY, is_strict=False):
    return step_summary(reports, closing, room_bytes=room_bytes, is_strict=is_strict)


def faster():
    gain = judgement(gate="baseline", reason="replay is 15 % faster than the baseline (median 112.4 -> 98.0 µs)")
    return report("tests/test_a.py::test_gain", batch(8, judgement(), gain, baseline=saved(), comparison="faster"))


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_the_step_summary_reads_as_reviewed(golden):
    rehearsed = report("tests/test_b.py::test_twin", batch(1, timing=timing(250.0, 50.0, 100.0)), device=CPU)
    golden("report/step-summary.md", summary_of([rehearsed, faster(), *story()]))


def test_in_a_strict_run_what_was_not_proven_is_among_the_failures():
    missing = report("tests/test_a.py::test_new", batch(1, judgement(Verdict.NOT_JUDGED, reason="no entry")))
    failures = [summary_of([missing, faster()], is_strict=strict).count("<details") for strict in (False, True)]
    assert failures == [0, 1]


def test_a_hostile_name_is_text_in_every_part():
    moved = judgement(gate="baseline", reason=HOSTILE)
    found = report(HOSTILE, batch(1, WRONG), batch(8, moved, baseline=saved(), comparison="slower"))
    page = summary_of([found])
    tags = Tags(page)
    assert tags.tags == {"h3", "details", "summary", "code", "pre", "ul", "li", "table", "tr", "th", "td"}
    assert tags.text.count("a|b`c`?# d <script>alert(1)</script> ::error::e %0A ?[2J? </pre>") == 5
    markdown = [block for block in page.strip().split("\n\n") if not block.startswith("<")]
    assert markdown == ["## CUDA graphs", "### Failed", "### Moved against the baseline"]


def test_what_does_not_fit_is_cut_from_the_end_of_the_ranking_and_said():
    passed = [report(f"tests/test_é.py::test_{n}") for n in range(400)]
    failing = report("tests/test_a.py::test_wrong", batch(1, WRONG))
    page = summary_of([*passed, failing], room_bytes=20_000)
    shown = page.count("<tr><td>")
    assert 15_000 < len(page.encode()) <= 20_000
    assert f"\n{shown} of 401 models are shown, the worst first: GitHub shows at most 1 MiB" in page
    assert "<code>tests/test_a.py::test_wrong</code>: wrong" in page
    assert page.rstrip().endswith("</pre>")


@pytest.mark.parametrize("room_bytes", [0, -5, 20])
def test_without_room_there_is_no_summary(room_bytes):
    assert summary_of(story(), room_bytes=room_bytes) == ""


def test_one_endless_message_leaves_room_for_the_rest():
    endless = judgement(Verdict.WRONG, gate="check", reason="x" * 3_000_000)
    page = summary_of([report("tests/test_a.py::test_endless", batch(1, endless)), faster()])
    assert "... cut here, the log has the rest" in page
    assert "test_gain" in page


def test_an_annotation_is_one_line_whose_parts_cannot_be_forged(golden):
    lines = [
        annotation("batch 8: 1.07x\n  50 % less", title="tests/test_a.py::test_a[1,2]", file="tests/a.py", line=7),
        annotation(HOSTILE, title=HOSTILE, file=HOSTILE, line=1),
    ]
    golden("report/annotations.txt", "\n".join(lines))


def test_a_failure_is_annotated_where_its_hazard_is():
    here, library = Site(file="model.py", line=12), Site(file="lib.py", line=3)
    found = report(
        "a",
        batch(1, judgement(Verdict.WRONG, gate="check", hazard="baked-scalar")),
        findings=(
            Finding(id="rng", level="note", message="", fix="", site=Site(file="other.py", line=1)),
            Finding(id="baked-scalar", level="note", message="", fix="", site=library, called_from=here),
        ),
    )
    assert list(sites_of_failure(found)) == [here, library]

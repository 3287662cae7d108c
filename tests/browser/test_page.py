"""The HTML pages in a real browser: what a person sees, reads and can do, and that nothing leaves the page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import judgement, report
from tests.unit.report.test_page import HOSTILE, story, written
from tests.unit.report.test_page import page as page_text

from pytest_cudagraph.report import Column
from pytest_cudagraph.report.page import rendered
from pytest_cudagraph.values import Table, Verdict

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="the browser tests need axe-playwright-python"
)

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium and no google-chrome on the PATH"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # Without its sandbox: continuous integration runs as root.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page. At the end of the test, it has made no request and its console is empty."""
    contexts, seen = [], []

    def open_page(path, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: seen.append(message.text))
        shown.on("pageerror", lambda error: seen.append(str(error)))
        shown.on("dialog", lambda dialog: (seen.append("a dialog"), dialog.dismiss()))
        shown.on("request", lambda request: seen.append(request.url) if request.url != path.as_uri() else None)
        shown.goto(path.as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert [each for each in seen if each != "data:,"] == []


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    """The page of a run with each verdict and section, and with names that would like to act."""
    hostile = [
        replace(report(f"tests/test_z.py::test[{name}]"), judgements=(judgement(Verdict.FAILED, reason=name),))
        for name in HOSTILE
    ]
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(page_text(written([*story(), *hostile])), encoding="utf-8")
    return path


def column(shown, number):
    return [row.locator("td").nth(number).inner_text() for row in shown.locator("#rows tbody tr:visible").all()]


def names(shown):
    return [each.split("\n")[0] for each in column(shown, 0)]


def test_the_demo_names_its_page_and_the_page_shows_its_run(opened, tmp_path):
    command = [sys.executable, ROOT / "examples" / "demo.py", "-k", "linear", "-p", "no:xdist", "-q"]
    # The other examples import transformers.
    options = [
        "--ignore-glob=*/test_[!l]*",
        "--ignore-glob=*/test_ll*",
        "--cudagraph-time-budget=0.4",
        f"--cudagraph-baseline={tmp_path / 'baseline'}",
    ]
    ran = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "wrote the page cudagraph-demo.html" in ran.stdout.splitlines()

    shown = opened(tmp_path / "cudagraph-demo.html")
    assert names(shown) == ["test_linear_classifier.py::test_linear_classifier", "", "", ""]
    assert column(shown, 1) == ["1", "2", "4", "8"]
    assert shown.locator(".test svg.p:visible").count() >= 2


def test_a_click_sorts_by_number_across_units_and_what_is_no_number_stays_last(opened, run_page):
    shown = opened(run_page)
    assert names(shown)[:2] == ["test_a.py::test_mlp", ""]
    replay = shown.locator("#rows").get_by_role("button", name="replay")

    replay.click()
    rising = column(shown, 4)
    # Now each row has its test's name.
    assert "" not in names(shown)
    replay.click()
    falling = column(shown, 4)
    numbers = [each for each in falling if each != "-"]
    assert len(set(numbers)) > 1
    assert numbers == sorted(numbers, key=lambda each: -float(each.split()[0]))
    assert [each for each in rising if each != "-"] == numbers[::-1]
    assert set(rising[len(numbers) :]) == set(falling[len(numbers) :]) == {"-"}
    assert shown.locator("#rows th[aria-sort]").get_attribute("aria-sort") == "descending"

    shown.locator("#rows").get_by_role("button", name="verdict").click()
    assert column(shown, 10) == sorted(column(shown, 10))


def test_ratios_thousands_and_dates_are_sorted_whole(opened, tmp_path):
    titles = ["speedup", "rows/s", "date"]
    cells = [["1.42x (1.40-1.44)", "62", "2026-11-09"], ["1.07x", "1,339", "2026-10-30"], ["1.3x", "157", "2025-12-31"]]
    table = Table(title="sorted", columns=tuple(Column(title=each) for each in titles), rows=tuple(map(tuple, cells)))
    path = tmp_path / "sorted.html"
    path.write_text(rendered("history.html", {"title": "", "counted": "", "notes": [], "moves": table, "entries": []}))
    shown = opened(path)
    rising = []
    for number, title in enumerate(titles):
        shown.get_by_role("button", name=title).click()
        rising.append([row.locator("td").nth(number).inner_text() for row in shown.locator("tbody tr").all()])
    assert rising == [
        ["1.07x", "1.3x", "1.42x (1.40-1.44)"],
        ["62", "157", "1,339"],
        ["2025-12-31", "2026-10-30", "2026-11-09"],
    ]


def test_a_filter_leaves_the_rows_and_tests_that_fit(opened, run_page):
    shown = opened(run_page)
    tests = shown.locator(".test:visible summary")
    everything = tests.count()

    shown.get_by_label("Filter by test").fill("TEST_B busy")
    assert names(shown) == ["test_b.py::test_busy"]
    assert tests.count() == 1
    assert shown.locator(".tools output").inner_text().startswith("1 of ")

    shown.get_by_label("Filter by test").fill("")
    shown.get_by_label("Verdict", exact=True).select_option("slower")
    assert names(shown) == ["test_a.py::test_mlp"]
    assert column(shown, 1) == ["8"]
    assert tests.all_inner_texts() == ["failed tests/test_a.py::test_mlp 2 batch sizes"]

    shown.get_by_label("Verdict", exact=True).select_option("every verdict")
    assert tests.count() == everything
    shown.get_by_role("button", name="Unfold all tests").click()
    assert shown.locator(".test:not([open])").count() == 0


def test_without_javascript_everything_can_be_read(opened, run_page):
    shown = opened(run_page, java_script_enabled=False)
    assert not shown.locator(".tools").is_visible()
    assert names(shown)[:2] == ["test_a.py::test_mlp", ""]
    folded = shown.locator(".test:not([open])").first
    assert not folded.locator("figure").first.is_visible()
    folded.locator("summary").click()
    assert shown.locator("body").inner_text().count("Latency by batch size") >= 2


def test_names_from_outside_are_text(opened, run_page):
    text = opened(run_page).locator("main").inner_text()
    assert [name for name in HOSTILE[:4] if name not in text] == []
    assert "?[31mred?[0m??gnp.exe" in text


SCREENS = {
    "wide": {"color_scheme": "light"},
    "narrow": {"color_scheme": "dark", "viewport": {"width": 320, "height": 640}},
}


@pytest.mark.parametrize("options", SCREENS.values(), ids=SCREENS)
def test_each_screen_shows_the_page_whole_and_axe_finds_nothing_serious(opened, run_page, options):
    # Axe is put into the page, which its policy would not allow.
    shown = opened(run_page, bypass_csp=True, **options)
    shown.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true })")
    assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    background = shown.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 150) == (options["color_scheme"] == "dark")
    violations = axe.Axe().run(shown).response["violations"]
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in serious] == []

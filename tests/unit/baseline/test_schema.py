"""A baseline's text: read by pytest-benchmark, reviewed by people, refused when it is not ours."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import subprocess
import sys
from dataclasses import replace

import pytest
from pytest_benchmark import cli
from tests.facts import H200, by_key, latency, saved, sessions, with_figures

from pytest_cudagraph.baseline import Content, parse, text_of
from pytest_cudagraph.baseline.text import machine_info
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.values import Interval

TWO = by_key(
    saved("tests/test_a.py::test_b[fp16]", 8, compiled=latency(80.0)),
    saved("tests/test_a.py::test_a", 16),
    saved("tests/test_a.py::test_a", 2),
)


def text(entries=TWO) -> str:
    commit = {"id": "1a2b3c", "branch": "main", "dirty": False}
    return text_of(Content(entries=entries, machine_info=machine_info(H200), commit_info=commit))


def test_the_file_reads_as_reviewed(golden):
    history = sessions(60.0, 60.4, reference_us=150.0)
    golden("baseline/file.json", text(by_key(saved(compiled=latency(80.0), sessions=history))))


def test_a_session_more_is_a_line_more():
    one, two = (text(by_key(saved(sessions=sessions(*[60.0] * count)))).splitlines() for count in (1, 2))

    assert len(two) == len(one) + 1
    # The line before it gets its comma.
    assert len(set(two) - set(one)) == 2


def test_a_replaced_batch_size_changes_at_most_a_dozen_lines():
    def written(size_1_us, saved_at, commit):
        kept, changed = saved(batch_size=8), saved(
            batch_size=1, eager=latency(3 * size_1_us), compiled=latency(2 * size_1_us), replay=latency(size_1_us),
            sessions=sessions(size_1_us), saved_at=saved_at, speedup=Interval(estimate=size_1_us, low=1.0, high=99.0),
        )  # fmt: skip
        found = Content(
            entries=by_key(kept, changed), machine_info=machine_info(H200), commit_info={"id": commit, "dirty": False}
        )
        return text_of(found).splitlines()

    diff = difflib.ndiff(written(60.0, "2026-11-21", "1a2b3c4"), written(90.0, "2026-11-22", "9f8e7d6"))
    assert 0 < len([line for line in diff if line.startswith("+ ")]) <= 12


def test_a_restless_session_is_read_as_it_was():
    (session,) = sessions(60.0, reference_us=150.0)
    entries = by_key(saved(sessions=(replace(session, unrest_log=0.25),)))

    assert '"unrest": 0.25' in text(entries)
    assert parse(text(entries), "a.json").entries == entries
    assert "unrest" not in text(by_key(saved(sessions=(session,))))


def test_the_figures_of_generations_stand_in_the_line_of_their_session():
    entries = by_key(with_figures(saved(sessions=sessions(60.0, 60.4)), ttft=900.0, itl=61.0))
    session = entries["tests/test_a.py::test_a", 8].sessions[0]
    restless = replace(session.figures["itl"], unrest_log=0.25)
    entries = by_key(saved(sessions=(replace(session, figures={**session.figures, "itl": restless}),)))

    assert '"figures": {"itl": {"median": 6.1e-05, "q1": 6.039e-05, "unrest": 0.25}, "ttft": {' in text(entries)
    assert parse(text(entries), "a.json").entries == entries


def test_a_commit_may_be_called_anything():
    odd = replace(sessions(60.0)[0], commit='one line: "x", {1}\n\\')
    entries = by_key(saved('t.py::test[one line: "x"]', sessions=(odd,)))

    assert parse(text(entries), "a.json").entries == entries


def test_what_was_written_is_read_again():
    content = parse(text(), "a.json")

    assert content.entries == TWO
    assert content.commit_info == {"id": "1a2b3c", "branch": "main", "dirty": False}
    assert content.machine_info == machine_info(H200)


def test_reading_and_writing_again_changes_no_byte():
    odd = saved(eager=latency(123.456789), replay=latency(0.0314159), kernels=None, kernel_names={})
    first = text(by_key(odd))

    assert text_of(parse(first, "a.json")) == first


@pytest.mark.parametrize(("median_us", "median_ns"), [(123.456789, 123_500.0), (122.1, 122_100.0)])
def test_numbers_keep_four_digits_and_no_tail(median_us, median_ns):
    entries = parse(text(by_key(saved(eager=latency(median_us)))), "a.json").entries

    assert entries["tests/test_a.py::test_a", 8].eager.median_ns == median_ns


def test_records_are_ordered_by_name_batch_size_and_arm():
    names = [record["fullname"] for record in json.loads(text())["benchmarks"]]

    assert names == [
        "tests/test_a.py::test_a[2-eager]",
        "tests/test_a.py::test_a[2-replay]",
        "tests/test_a.py::test_a[16-eager]",
        "tests/test_a.py::test_a[16-replay]",
        "tests/test_a.py::test_b[fp16-8-eager]",
        "tests/test_a.py::test_b[fp16-8-compiled]",
        "tests/test_a.py::test_b[fp16-8-replay]",
    ]


def test_the_order_of_entries_does_not_change_the_text():
    assert text(dict(reversed(TWO.items()))) == text()


def pytest_benchmark(*arguments, cwd):
    tool = [sys.executable, "-m", "pytest_benchmark"]
    return subprocess.run([*tool, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_pytest_benchmark_compares_our_file(tmp_path):
    path = tmp_path / "nvidia-h200.json"
    path.write_text(text())

    done = pytest_benchmark("compare", str(path), "--group-by=group", f"--csv={tmp_path / 'out.csv'}", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "benchmark 'tests/test_a.py::test_b[fp16] batch 8': 3 tests" in done.stdout
    assert "test_b[fp16-8-replay]" in done.stdout
    assert "60.0000 (1.0)" in done.stdout
    assert "120.0000 (2.00)" in done.stdout
    assert "Failed" not in done.stdout + done.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 8


@pytest.mark.parametrize("group_by", ["name", "func", "fullname", "fullfunc", "param", "param:arm", "param:batch_size"])
def test_pytest_benchmark_groups_our_records(tmp_path, group_by, monkeypatch, capsys):
    path = tmp_path / "nvidia-h200.json"
    path.write_text(text())
    monkeypatch.chdir(tmp_path)

    monkeypatch.setattr(sys, "argv", ["pytest-benchmark", "compare", str(path), f"--group-by={group_by}"])
    cli.main()

    assert "Legend" in capsys.readouterr().out


def edited(edit) -> str:
    document = json.loads(text())
    edit(document)
    return json.dumps(document)


def ours(document, number=1):
    return document["benchmarks"][number]["extra_info"]["cudagraph"]


MENDED = "restore it, or remove it and save anew with --cudagraph-update"
SAVING = "--cudagraph-update writes baselines, to .cudagraph"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", f"a.json: not valid JSON (Expecting value: line 1 column 1 (char 0)); {MENDED}"),
        (
            "{\n<<<<<<< HEAD\n",
            "a.json: not valid JSON (Expecting property name enclosed in double quotes: line 2 column 1 (char 2)); "
            "it holds unresolved merge conflicts: keep one side of each",
        ),
        ("[]", f"a.json: not a baseline of pytest-cudagraph (it holds no records); {SAVING}"),
        ("{}", f"a.json: not a baseline of pytest-cudagraph (it holds no records); {SAVING}"),
        ('{"benchmarks": []}', f"a.json: not a baseline of pytest-cudagraph (it holds no records); {SAVING}"),
        (
            '{"benchmarks": [{"name": "a", "extra_info": {}, "stats": {}}]}',
            "a.json: record 1 was not written by pytest-cudagraph: keep it elsewhere",
        ),
        (
            '{"benchmarks": [3]}',
            "a.json: record 1 was not written by pytest-cudagraph: keep it elsewhere",
        ),
    ],
)
def test_a_broken_or_foreign_file_is_refused(broken, message):
    with pytest.raises(BaselineError) as caught:
        parse(broken, "a.json")

    assert str(caught.value) == message


PLACE = "a.json: tests/test_a.py::test_a, batch 2"
AGAIN = "restore the file, or remove the records of this entry"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: ours(d).update(schema=3),
            "a.json: record 2 has schema 3, this pytest-cudagraph reads schema 2: upgrade pytest-cudagraph",
        ),
        (
            lambda d: ours(d).update(schema=1),
            "a.json: record 2 has schema 1, this pytest-cudagraph reads schema 2: save it anew with --cudagraph-update",
        ),
        (
            lambda d: ours(d)["sessions"][0].update(unrest=1e9),
            f"{PLACE} is damaged (unrest must be at most 30, not 1000000000.0); {AGAIN}",
        ),
        (
            lambda d: ours(d).update(sessions=[]),
            f"{PLACE} is damaged (sessions must be a list of at least one session, not []); {AGAIN}",
        ),
        (
            lambda d: ours(d).update(schema="one"),
            "a.json: record 2 was not written by pytest-cudagraph: keep it elsewhere",
        ),
        (
            lambda d: ours(d).update(arm="graph"),
            "a.json: record 2 lacks a name, a batch size or an arm (eager, compiled, replay)",
        ),
        (lambda d: d["benchmarks"].pop(0), f"{PLACE} has no record of eager; {AGAIN}"),
        (lambda d: d["benchmarks"].pop(1), f"{PLACE} has no record of replay; {AGAIN}"),
        (
            lambda d: d["benchmarks"].append(d["benchmarks"][0]),
            "a.json: record 8 repeats tests/test_a.py::test_a, batch 2, eager: keep one of the two",
        ),
        (
            lambda d: ours(d)["sessions"][0].pop("q1"),
            f"{PLACE} is damaged (no 'q1'); {AGAIN}",
        ),
        (
            lambda d: ours(d)["sessions"][0].update(reference=-1, reference_q1=1),
            f"{PLACE} is damaged (reference must be a positive number, not -1); {AGAIN}",
        ),
        (lambda d: ours(d).pop("speedup"), f"{PLACE} is damaged (no 'speedup'); {AGAIN}"),
        (
            lambda d: d["benchmarks"][1]["stats"].update(median=0),
            f"{PLACE} is damaged (median must be a positive number, not 0); {AGAIN}",
        ),
        (
            lambda d: d["benchmarks"][1]["stats"].update(median=float("nan")),
            f"{PLACE} is damaged (median must be a positive number, not nan); {AGAIN}",
        ),
        (
            lambda d: d["benchmarks"][1]["stats"].update(q1="fast"),
            f"{PLACE} is damaged (q1 must be a positive number, not 'fast'); {AGAIN}",
        ),
        (
            lambda d: d["benchmarks"][1].update(stats=None),
            f"{PLACE} is damaged (stats must be a mapping, not None); {AGAIN}",
        ),
        (
            lambda d: ours(d).update(saved_at=None),
            f"{PLACE} is damaged (saved_at must be a text, not None); {AGAIN}",
        ),
        (
            lambda d: ours(d)["sessions"][0].update(figures={"itl": {"median": 1e-3}}),
            f"{PLACE} is damaged (no 'q1'); {AGAIN}",
        ),
        (
            lambda d: ours(d)["sessions"][0].update(figures={"itl": 1e-3}),
            f"{PLACE} is damaged (itl must be a mapping, not 0.001); {AGAIN}",
        ),
        (
            lambda d: ours(d).update(batch_size=0),
            "a.json: record 2 lacks a name, a batch size or an arm (eager, compiled, replay)",
        ),
        (
            lambda d: ours(d).update(batch_size=True),
            "a.json: record 2 lacks a name, a batch size or an arm (eager, compiled, replay)",
        ),
    ],
)
def test_a_damaged_record_is_named(edit, message):
    with pytest.raises(BaselineError) as caught:
        parse(edited(edit), "a.json")

    assert str(caught.value) == message


HUGE = 10**400


@pytest.mark.parametrize("value", [math.inf, math.nan, -3, 2.5, True, "12"])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda d: (ours(d), "kernels"), "kernels"),
        (lambda d: (ours(d)["kernel_names"], "aten.mul"), "aten.mul"),
        (lambda d: (d["benchmarks"][1]["stats"], "rounds"), "rounds"),
    ],
    ids=["kernels", "kernel_names", "rounds"],
)
def test_a_count_that_is_none_is_named(place, said, value):
    def edit(document):
        mapping, key = place(document)
        mapping[key] = value

    with pytest.raises(BaselineError) as caught:
        parse(edited(edit), "a.json")

    found = reprlib.repr(value)
    assert str(caught.value) == f"{PLACE} is damaged ({said} must be a whole number, not {found}); {AGAIN}"


@pytest.mark.parametrize("value", [math.inf, math.nan, HUGE, 1e308, 5e-324, 0, True, None, "fast", [[1]]])
@pytest.mark.parametrize(
    "place",
    [
        lambda d: (d["benchmarks"][1]["stats"], "median"),
        lambda d: (ours(d), "q90"),
        lambda d: (ours(d)["speedup"], "high"),
        lambda d: (ours(d)["sessions"][0], "median"),
        lambda d: (ours(d)["sessions"][0], "unrest"),
    ],
    ids=["median", "q90", "speedup", "session", "unrest"],
)
def test_a_number_that_nothing_can_be_made_of_is_named(place, value):
    def edit(document):
        mapping, key = place(document)
        mapping[key] = value

    with pytest.raises(BaselineError, match="must be a positive number") as caught:
        parse(edited(edit), "a.json")

    assert str(caught.value).startswith(f"{PLACE} is damaged (")
    assert reprlib.repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("name", None, "name must be a text, not None"),
        ("name", ["H200"], "unhashable type: 'list'"),
        ("kind", 3, "kind must be a text, not 3"),
        ("driver", 580, "driver must be a text, not 580"),
        ("torch", None, "torch must be a text, not None"),
        ("threads", "16", "threads must be a whole number, not '16'"),
        ("power_limit_w", math.inf, "power_limit_w must be a whole number, not inf"),
    ],
)
def test_a_device_that_is_none_is_named(key, value, reason):
    with pytest.raises(BaselineError) as caught:
        parse(edited(lambda document: ours(document)["device"].update({key: value})), "a.json")

    assert str(caught.value) == f"{PLACE} is damaged ({reason}); {AGAIN}"


def test_what_a_device_need_not_tell_may_be_missing():
    told = edited(lambda document: ours(document)["device"].update(driver=None, mig=None, power_limit_w=None))

    assert parse(told, "a.json").entries["tests/test_a.py::test_a", 2].device.driver is None


def test_brackets_nested_too_deeply_are_no_json():
    with pytest.raises(BaselineError, match=r"^a\.json: not valid JSON \(nested too deeply\)"):
        parse("[" * 100_000, "a.json")


def test_a_number_of_thousands_of_digits_is_refused():
    broken = text().replace('"kernels": 46', f'"kernels": 1{"0" * 5000}', 1)

    with pytest.raises(BaselineError, match=r"a\.json: (not valid JSON|tests/test_a.py::test_a, batch 2 is damaged)"):
        parse(broken, "a.json")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_what_could_not_be_read_again_is_never_written(value):
    broken = replace(saved(), replay=replace(latency(60.0), median_ns=value))

    with pytest.raises(ValueError, match="a latency must be a positive number"):
        text(by_key(broken))

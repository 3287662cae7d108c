"""Exports: whole files, merged without loss, and read by Prometheus' own parser."""

import errno
import itertools
import json
import os
import platform
import random
import signal
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from tests.fake_clock import FakeClock

from pytest_cudagraph import CallMonitor, files
from pytest_cudagraph.errors import CudagraphError, InputError
from pytest_cudagraph.serving.calls import ResourceSpread

DOCS = (Path(__file__).parents[4] / "docs" / "monitor.md").read_text(encoding="utf-8")


@pytest.fixture
def process(monkeypatch):
    """Makes this process another one."""

    def be(pid):
        monkeypatch.setattr(os, "getpid", lambda: pid)

    monkeypatch.setattr("time.time_ns", lambda: 1_790_000_000 * 10**9)
    monkeypatch.setattr(platform, "node", lambda: "server")
    be(7)
    return be


def used(calls=3, name="decode"):
    """A monitor with calls of 1, 2, 3 ... ms, of which the last fails."""
    clock = FakeClock()
    monitor = CallMonitor(clock=clock)
    for ms in range(1, calls + 1):
        try:
            with monitor.measure(name, tokens=8, batch_size=4) as call:
                clock.time_ns += ms * 1_000_000
                call.note("eager", "no rows") if ms == 1 else call.note("graph", "")
                if ms == calls:
                    raise TimeoutError
        except TimeoutError:
            pass
    gpu = ResourceSpread(
        process="server-7", reading="sm_clock_mhz", gpu=0, samples=2, mean=1900, minimum=1820, maximum=1980, last=1980
    )
    monitor._merged.append(gpu)
    return monitor


def test_the_json_export_reads_as_reviewed(process, tmp_path, golden):
    path = used().export(tmp_path / "calls.json")
    golden("monitor/export.json", json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=1))


def test_every_field_of_the_json_export_is_described(process, tmp_path):
    found = json.loads(used().export(tmp_path / "calls.json").read_text(encoding="utf-8"))

    def keys(value):
        for each in value if isinstance(value, list) else []:
            yield from keys(each)
        for key, each in value.items() if isinstance(value, dict) else []:
            yield key
            yield from keys(each) if key not in ("failures", "served", "reasons") else ()

    assert {key for key in keys(found) if f"`{key}`" not in DOCS and f"`{key}[]`" not in DOCS} == set()


def test_the_openmetrics_text_reads_as_reviewed(process, golden):
    golden("monitor/openmetrics.prom", used().openmetrics())


@pytest.mark.parametrize("parse", [openmetrics_families, text_families], ids=["openmetrics", "earlier text format"])
def test_prometheus_reads_the_same_numbers(process, tmp_path, parse):
    hostile = 'a "quoted" \\ name\nof two lines'
    monitor = used(calls=300, name=hostile)
    text = monitor.export(tmp_path / "calls.prom", format="openmetrics").read_text(encoding="utf-8")
    samples = [each for family in parse(text) for each in family.samples]
    found = {
        (each.name, each.labels.get("le", each.labels.get("path", each.labels.get("error")))): each.value
        for each in samples
        if each.labels.get("name") == hostile
    }
    assert found["cudagraph_call_duration_seconds_count", None] == 299
    assert found["cudagraph_call_duration_seconds_sum", None] == pytest.approx(sum(range(300)) / 1e3)
    assert found["cudagraph_call_duration_seconds_bucket", "0.067108864"] == 67
    assert found["cudagraph_call_tokens_total", None] == 299 * 8
    assert found["cudagraph_calls_failed_total", "TimeoutError"] == 1
    assert found["cudagraph_model_calls_total", "graph"] == 299
    (clock,) = [each for each in samples if each.name == "cudagraph_gpu_sm_clock_hertz"]
    assert (clock.labels, clock.value) == ({"process": "server-7", "gpu": "0"}, 1.98e9)


def test_an_empty_monitor_is_read_too(process):
    assert {family.name for family in openmetrics_families(CallMonitor().openmetrics())} == {
        "cudagraph_call_duration_seconds", "cudagraph_calls_failed", "cudagraph_call_tokens", "cudagraph_call_rows",
        "cudagraph_model_calls",
    }  # fmt: skip


def test_exports_of_eight_processes_to_one_folder_add_up(process, tmp_path):
    for pid in range(8):
        process(pid)
        for _ in range(2):  # a later export replaces the earlier one of its process
            used(calls=10 * (pid + 1)).export(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"calls-server-{pid}.json" for pid in range(8)]
    merged = CallMonitor.merged(tmp_path, keep=5)
    found = merged.summary()["decode"]
    assert (found.calls, found.failed, found.tokens) == (360, 8, 352 * 8)
    assert (found.served, found.reasons) == ({"eager": 8, "graph": 352}, {"no rows": 8})
    assert (found.minimum_ns, found.maximum_ns) == (1_000_000, 79_000_000)
    assert (found.started_at_s, found.ended_at_s) == (1_790_000_000, 1_790_000_003.24)
    assert len(merged.records()) == 5
    again = CallMonitor.merged(merged.export(tmp_path / "all.json"))
    assert again.summary() == merged.summary()
    assert len(again._state().resources) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_processes_that_export_at_once_and_one_that_is_killed_meanwhile_lose_nothing(tmp_path):
    read, write = os.pipe()
    children = [_exporting_process(tmp_path, calls, write, is_endless=calls == 1) for calls in range(1, 9)]
    for _ in children:
        assert os.read(read, 1) == b"."  # a first export is written
    os.kill(children[0], signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [-signal.SIGKILL, *[0] * 7]
    found = CallMonitor.merged(tmp_path).summary()["decode"]
    assert (found.calls, found.tokens) == (36, 36)


def _exporting_process(folder, calls, write, *, is_endless):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        monitor = CallMonitor()
        for _ in range(calls):
            with monitor.measure("decode", tokens=1):
                pass
        monitor.export(folder)
        os.write(write, b".")
        for _ in itertools.count() if is_endless else range(20):
            monitor.export(folder)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_file_that_cannot_be_written_is_one_sentence_and_the_calls_stay(process, tmp_path, monkeypatch, code):
    def fail(path, text):
        raise OSError(code, os.strerror(code), str(path))

    monitor = used()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_text", fail)
        with pytest.raises(CudagraphError) as caught:
            monitor.export(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'calls-server-7.json'}: the calls cannot be written ({os.strerror(code)}); "
        "no file was changed, and the monitor keeps the calls"
    )
    assert monitor.export(tmp_path).exists()


def damaged(change):
    def text(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        change(found)
        return json.dumps(found)

    return text


@pytest.mark.parametrize(
    "text",
    [
        lambda path: "",
        lambda path: "[]",
        lambda path: path.read_text(encoding="utf-8")[:-40],
        damaged(lambda found: found.update(schema=2)),
        damaged(lambda found: found.pop("last")),
        damaged(lambda found: found["calls"][0].update(token_seconds=float("nan"))),
        damaged(lambda found: found["calls"][0]["histogram"]["counts"].pop()),
        damaged(lambda found: found["calls"][0]["histogram"].update(lower_ns=[-1, 2])),
        damaged(lambda found: found["calls"][0].update(tokens="many")),
        damaged(lambda found: found["resources"][0].pop("last")),
    ],
)
def test_a_damaged_export_is_an_error_that_names_the_file(process, tmp_path, text):
    path = used().export(tmp_path)
    path.write_text(text(path), encoding="utf-8")
    with pytest.raises(InputError, match=r"calls-server-7\.json is no JSON file of CallMonitor\.export"):
        CallMonitor.merged(tmp_path)


def test_a_missing_export_and_a_wrong_format_are_one_sentence(tmp_path):
    with pytest.raises(InputError) as caught:
        CallMonitor.merged(tmp_path / "none.json")
    assert str(caught.value) == f"{tmp_path / 'none.json'}: cannot be read (No such file or directory)"
    with pytest.raises(InputError, match=r"^format is 'json' or 'openmetrics'; found 'csv'$"):
        CallMonitor().export(tmp_path, format="csv")


def test_a_name_that_utf_8_cannot_hold_fails_no_scrape():
    monitor = CallMonitor(clock=FakeClock())
    with monitor.measure("half \udc80"):
        pass
    text = monitor.openmetrics().encode("utf-8").decode("utf-8")
    assert any(sample.labels["name"].startswith("half ") for family in openmetrics_families(text)
               for sample in family.samples)  # fmt: skip


def places(value, path=()):
    """The path of each value in a JSON document."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def with_value(document, path, value):
    changed = json.loads(json.dumps(document))
    *outer, last = path
    place = changed
    for key in outer:
        place = place[key]
    place[last] = value
    return changed


WRONG = [None, True, -1, 0, 1.5, 10**400, float("nan"), float("inf"), "", "x" * 50, "-1", [], [1], [[]], {}, {"a": 1}]


def test_a_damaged_export_is_refused_in_one_error_or_read_whole(process, tmp_path):
    document = json.loads(used().export(tmp_path / "calls.json").read_text(encoding="utf-8"))
    damaged, wrong = tmp_path / "damaged.json", []
    for path, value in itertools.product([path for path in places(document) if path], WRONG):
        damaged.write_text(json.dumps(with_value(document, path, value)), encoding="utf-8")
        try:
            merged = CallMonitor.merged(damaged)
            list(openmetrics_families(merged.openmetrics()))
            list(text_families(merged.openmetrics()))
            str(merged.summary("decode"))
            merged.export(tmp_path / "again.json")
        except InputError:
            pass
        except Exception as error:
            wrong.append((path, value if value != 10**400 else "10**400", repr(error)))
    assert wrong == []


def by_prometheus(text, fraction):
    """``histogram_quantile``: linear within the bucket of the rank."""
    (family,) = (each for each in openmetrics_families(text) if each.name == "cudagraph_call_duration_seconds")
    buckets = [(float(each.labels["le"]), each.value) for each in family.samples if each.name.endswith("_bucket")]
    rank, low, below = fraction * buckets[-1][1], 0.0, 0.0
    for limit, count in buckets:
        if count >= rank:
            return low + (limit - low) * (rank - below) / (count - below)
        low, below = limit, count
    raise AssertionError


@pytest.mark.parametrize(
    "draw", [lambda rng: rng.gauss(1.5e6, 1e5), lambda rng: rng.lognormvariate(14, 0.3), lambda rng: 1.1e6]
)
def test_quantiles_that_prometheus_derives_are_within_a_quarter_of_the_true_ones(draw):
    clock, rng = FakeClock(), random.Random(1)
    monitor, durations = CallMonitor(clock=clock), []
    for _ in range(2_000):
        durations.append(int(draw(rng)))
        with monitor.measure("step"):
            clock.time_ns += durations[-1]
    durations.sort()
    for fraction in (0.5, 0.9, 0.99):
        true_s = durations[int(fraction * 2_000) - 1] / 1e9
        assert by_prometheus(monitor.openmetrics(), fraction) == pytest.approx(true_s, rel=0.2), fraction

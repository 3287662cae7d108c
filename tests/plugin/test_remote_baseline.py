"""``--cudagraph-baseline`` takes a URL: read at the start, written at the end, and nothing is lost with the store."""

from __future__ import annotations

import json

import pytest

fsspec = pytest.importorskip("fsspec")

GOOD = "cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)"
URL = "memory://bucket/baselines"
# The store dies after the first write, which makes the lock.
DIES = """
def test_dies(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def die(*arguments, **options):
        raise ConnectionResetError("the store went away")

    MemoryFileSystem.{method} = die
"""


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    for method in ("pipe_file", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, method, getattr(MemoryFileSystem, method))
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = ["", "/bucket"]
    return system


@pytest.fixture
def remote(project):
    """Runs with a baseline in an object store that is part of this process."""
    project.write(good=GOOD)

    def run(*options, url=URL):
        return project.measure(f"--cudagraph-baseline={url}", *options)

    return run


def test_a_run_reads_the_store_and_an_update_writes_it(remote, project):
    first = remote("--cudagraph-update")
    first.stdout.fnmatch_lines(
        [f"cudagraph: *baseline {URL}/*.json*", "*2 passed, 2 new*", f"wrote 2 entries to {URL}/*"]
    )
    second = remote("--cudagraph-strict")
    second.assert_outcomes(passed=1)
    second.stdout.fnmatch_lines(["*2 passed*"])
    assert not (project.path / ".cudagraph").exists()


@pytest.mark.parametrize("method", ["pipe_file", "cat_file"])
def test_entries_of_an_update_that_the_store_does_not_take_are_left_here(remote, project, memory, method):
    project.pytester.makepyfile(test_zz=DIES.format(method=method))
    result = remote("--cudagraph-update", "--cudagraph-json=run.json")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            f"{URL}/*.json: cannot be * (the store went away)*; 2 entries are in .cudagraph-left/*.json: "
            f"send with pytest-cudagraph baseline merge .cudagraph-left -o {URL}"
        ]
    )
    (left,) = project.path.glob(".cudagraph-left/*.json")
    assert len(json.loads(left.read_text(encoding="utf-8"))["benchmarks"]) == 4
    assert not memory.find("/bucket")


def test_a_store_that_cannot_be_reached_stops_the_run_and_no_password_is_shown(remote, project):
    result = remote("--cudagraph-update", "--cudagraph-json=run.json", url="ftp://ann:secret@127.0.0.1:9/folder")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: ftp://[*][*][*]@127.0.0.1:9/folder: cannot be used (*refused*"])
    assert "secret" not in result.stdout.str() + result.stderr.str()


def test_the_document_shows_no_password(remote, project, monkeypatch):
    fsspec.filesystem("memory").mkdir("/ann:secret@bucket/folder")
    remote("--cudagraph-json=run.json", url="memory://ann:secret@bucket/folder").assert_outcomes(passed=1)
    text = (project.path / "run.json").read_text(encoding="utf-8")
    assert json.loads(text)["settings"]["baseline"] == "memory://***@bucket/folder"
    assert "secret" not in text


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("memory://typo/baselines", [], "its bucket [(]the first part of the path[)] does not exist: make it,*"),
        ("memory://typo/baselines", ["--cudagraph-update"], "its bucket [(]the first part of the path[)] does not*"),
        (URL, [], "the store has no such folder: correct the URL; to make it: pytest --cudagraph --cudagraph-update *"),
    ],
)
def test_a_place_that_the_store_lacks_stops_the_run_and_does_not_switch_the_gate_off(remote, url, options, told):
    result = remote(*options, url=url)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {url}: {told}"])

"""Files survive whatever happens while they are written, and lose nothing of what others wrote."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from tests.facts import CPU, H200, by_key, latency, saved, sessions

from pytest_cudagraph.baseline import Edit, JsonStore, remove_from, store
from pytest_cudagraph.errors import BaselineError

COMMIT = {"id": "1a2b3c"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / ".cudagraph"


@pytest.fixture
def kept(folder):
    return JsonStore(folder, H200)


def test_a_new_store_is_empty(kept):
    assert kept.load() == {}


def test_merging_adds_and_replaces(kept):
    kept.merge([saved("a"), saved("b")], commit_info=COMMIT)
    kept.merge([saved("b", kernels=7), saved("b", 16)], commit_info=COMMIT)

    assert kept.load() == by_key(saved("a"), saved("b", kernels=7), saved("b", 16))


def test_continuing_adds_the_session_to_what_was_written_meanwhile(kept):
    first, second = sessions(60.0, 61.0)
    kept.merge([saved("a", sessions=(first,))], commit_info=COMMIT)
    # Another process has read nothing yet, and writes what it found.
    new = saved("a", sessions=(second,), eager=latency(121))
    kept.update(lambda _: Edit([new]), commit_info=COMMIT, continues=True)

    assert kept.load() == by_key(saved("a", sessions=(first, second)))


def test_an_update_chooses_under_the_lock_from_what_the_file_holds_then(kept):
    kept.merge([saved("a")], commit_info=COMMIT)

    def choose(entries):
        with pytest.raises(Timeout), FileLock(kept.path.with_name(f".{kept.path.name}.lock"), timeout=0):
            pass
        return Edit([] if list(entries) != [("a", 8)] else [saved("b")])

    assert kept.update(choose, commit_info=COMMIT) == by_key(saved("a"))
    assert kept.load() == by_key(saved("a"), saved("b"))


def test_an_update_drops_what_it_is_told_to(kept):
    kept.merge([saved("a"), saved("a", 16)], commit_info=COMMIT)
    kept.update(lambda _: Edit([], drop=[("a", 16)]), commit_info=COMMIT)

    assert kept.load() == by_key(saved("a"))


def test_a_merge_counts_the_entries_and_names_those_that_it_replaced(kept):
    assert kept.merge([saved("a"), saved("b")], commit_info=COMMIT) == (2, ())
    assert kept.merge([saved("b"), saved("c")], commit_info=COMMIT) == (3, ())
    assert kept.merge([saved("b", kernels=7)], commit_info=COMMIT) == (3, (("b", 8),))


def test_removing_forgets_only_what_is_named(kept):
    kept.merge([saved("a"), saved("b"), saved("b", 16)], commit_info=COMMIT)
    remove_from(kept.path, [("b", 8), ("never", 1)])

    assert kept.load() == by_key(saved("a"), saved("b", 16))


def test_what_load_gives_is_a_copy(kept):
    kept.merge([saved("a")], commit_info=COMMIT)
    kept.load().clear()

    assert list(kept.load()) == [("a", 8)]


def test_the_file_is_named_after_the_device(folder):
    assert JsonStore(folder, H200).path == folder / "nvidia-h200.json"
    assert JsonStore(folder, CPU).path == folder / "cpu-amd-epyc-9b45.json"


def test_merging_nothing_writes_nothing(folder):
    JsonStore(folder, H200).merge([], commit_info=COMMIT)

    assert not folder.exists()


def test_merging_what_is_there_already_leaves_the_file_alone(kept):
    kept.merge([saved("a", eager=latency(123.456789))], commit_info=COMMIT)
    before = kept.path.read_text()
    kept.merge([saved("a", eager=latency(123.456788))], commit_info={"id": "another"})

    assert kept.path.read_text() == before


def test_a_file_without_entries_is_removed(kept):
    kept.merge([saved("a")], commit_info=COMMIT)
    remove_from(kept.path, [("a", 8)])

    assert not kept.path.exists()


def test_removing_keeps_what_the_file_says_of_machine_and_commit(kept):
    kept.merge([saved("a"), saved("b")], commit_info=COMMIT)
    remove_from(kept.path, [("a", 8)])

    document = json.loads(kept.path.read_text())
    assert document["commit_info"] == COMMIT
    assert document["machine_info"]["cudagraph"]["name"] == "NVIDIA H200"


def test_working_files_are_ignored_by_git_in_a_folder_of_our_own(folder, tmp_path):
    JsonStore(folder, H200).merge([saved("a")], commit_info=COMMIT)
    assert (folder / ".gitignore").read_text() == "*.lock\n*.tmp\n"

    JsonStore(tmp_path, H200).merge([saved("a")], commit_info=COMMIT)
    assert not (tmp_path / ".gitignore").exists()


def test_no_temporary_file_is_left(folder):
    JsonStore(folder, H200).merge([saved("a")], commit_info=COMMIT)

    assert list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp")) == []


def test_the_file_keeps_its_mode(kept):
    kept.merge([saved("a")], commit_info=COMMIT)
    kept.path.chmod(0o640)
    kept.merge([saved("b")], commit_info=COMMIT)

    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o640


def test_a_linked_file_stays_a_link(kept, tmp_path):
    kept.merge([saved("a")], commit_info=COMMIT)
    real = kept.path.rename(tmp_path / "shared.json")
    kept.path.symlink_to(real)
    kept.merge([saved("b")], commit_info=COMMIT)

    assert kept.path.is_symlink()
    assert set(json.loads(real.read_text())["benchmarks"][0]) >= {"fullname", "stats"}
    assert sorted(kept.load()) == [("a", 8), ("b", 8)]


@pytest.mark.parametrize("broken", ["{", '{"benchmarks": [{"name": "foreign"}]}', "[1]"])
@pytest.mark.parametrize("verb", ["load", "merge", "remove"])
def test_a_broken_or_foreign_file_is_named_and_stays_untouched(kept, folder, broken, verb):
    folder.mkdir()
    kept.path.write_text(broken)
    calls = {
        "load": kept.load,
        "merge": lambda: kept.merge([saved("a")], commit_info=COMMIT),
        "remove": lambda: remove_from(kept.path, [("a", 8)]),
    }

    with pytest.raises(BaselineError, match=r"nvidia-h200\.json") as caught:
        calls[verb]()

    # Who only reads leaves nothing to worry about.
    assert str(caught.value).endswith("; the file was left as it is") == (verb != "load")
    assert kept.path.read_text() == broken


def test_a_file_that_is_no_text_is_named(kept, folder):
    folder.mkdir()
    kept.path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(BaselineError, match=r"nvidia-h200\.json: cannot be read \('utf-8' codec"):
        kept.load()


def test_a_folder_in_the_place_of_the_file_is_named(kept):
    kept.path.mkdir(parents=True)

    with pytest.raises(BaselineError, match=r"nvidia-h200\.json: cannot be read \(Is a directory\)"):
        kept.load()


def failing(code):
    def fail(*arguments, **rest):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        (os, "fsync", errno.ENOSPC),
        (Path, "replace", errno.ENOSPC),
        (Path, "chmod", errno.EPERM),
        (Path, "open", errno.EROFS),
    ],
)
def test_a_full_disk_or_read_only_folder_leaves_the_old_file_whole(kept, folder, monkeypatch, owner, name, code):
    kept.merge([saved("a")], commit_info=COMMIT)
    before = kept.path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(code))
        with pytest.raises(BaselineError) as caught:
            kept.merge([saved("b")], commit_info=COMMIT)

    assert str(caught.value) == f"{kept.path}: cannot be written ({os.strerror(code)}); nothing was changed"
    assert kept.path.read_bytes() == before
    assert not list(folder.glob(".*.tmp"))


def test_an_interrupt_leaves_the_old_file_and_no_temporary_one(kept, folder, monkeypatch):
    kept.merge([saved("a")], commit_info=COMMIT)
    before = kept.path.read_bytes()

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kept.merge([saved("b")], commit_info=COMMIT)

    assert kept.path.read_bytes() == before
    assert not list(folder.glob(".*.tmp"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    kept = JsonStore(tmp_path / "file" / ".cudagraph", H200)

    with pytest.raises(BaselineError, match="cannot be written \\(Not a directory\\); nothing was changed"):
        kept.merge([saved("a")], commit_info=COMMIT)


def test_a_lock_held_by_another_is_said(kept, folder, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_WAIT_S", 0.0)
    folder.mkdir()
    with FileLock(folder / ".nvidia-h200.json.lock"), pytest.raises(BaselineError) as caught:
        kept.merge([saved("a")], commit_info=COMMIT)

    assert str(caught.value) == f"{kept.path}: another process has held its lock for 0 s"


def test_a_file_system_without_locks_is_named(kept, monkeypatch):
    def refuse(self, *arguments, **rest):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(BaselineError, match="cannot be written \\(no flock here\\); nothing was changed"):
        kept.merge([saved("a")], commit_info=COMMIT)


def test_what_a_killed_writer_left_behind_goes_with_the_next(kept, folder):
    kept.merge([saved("a")], commit_info=COMMIT)
    (folder / ".nvidia-h200.json.4711.tmp").write_text('{"half": ')
    (folder / ".nvidia-h100.json.4711.tmp").write_text("another's")
    kept.merge([saved("b")], commit_info=COMMIT)

    assert [path.name for path in folder.glob(".*.tmp")] == [".nvidia-h100.json.4711.tmp"]
    assert sorted(kept.load()) == [("a", 8), ("b", 8)]


def test_a_number_that_no_file_can_hold_is_refused(kept):

    with pytest.raises(BaselineError, match="cannot be written \\(a latency must be a positive number, not nan\\)"):
        kept.merge([saved("a", replay=latency(float("nan")))], commit_info=COMMIT)

    assert not kept.path.exists()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from pytest_cudagraph.baseline import JsonStore
from tests.facts import H200, saved
store = JsonStore(Path(sys.argv[1]), H200)
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    store.merge([saved(f"{{sys.argv[2]}}-{{number}}")], commit_info={{}})
"""


@pytest.mark.slow
def test_two_processes_merging_at_once_lose_nothing(folder):
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", WRITER.format(root=root), str(folder)]
    writers = [
        subprocess.Popen([*command, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for who in "ab"
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)

    assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(JsonStore(folder, H200).load()) == sorted(
        (f"{who}-{number}", 8) for who in "ab" for number in range(15)
    )

"""A file is written whole or not at all, keeps what its owner set, and is never a pipe or a device."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from pytest_cudagraph import files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, devices and permissions of POSIX")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "device"])
def test_only_regular_files_are_written(tmp_path, make):
    make(tmp_path / "run.json")
    before = (tmp_path / "run.json").stat()[:3]

    with pytest.raises(OSError, match="only a regular file is written"):
        files.write_text(tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").stat()[:3] == before


def test_the_file_that_the_process_prints_to_is_not_replaced(tmp_path):
    code = (
        "from pathlib import Path; from pytest_cudagraph import files; print('before', flush=True)\n"
        "try: files.write_text(Path('/dev/stdout'), 'document')\n"
        "except OSError as error: print(error.strerror)"
    )
    with (tmp_path / "out.txt").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)

    told = "only a regular file is written"
    assert (tmp_path / "out.txt").read_text() == f"before\n{told}\n"


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    link, target = tmp_path / "run.json", tmp_path / "real" / "target.json"
    link.symlink_to(target)

    for text in ("first", "second"):
        files.write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_an_existing_file_keeps_its_permissions_and_a_new_one_has_the_umask(tmp_path, mode):
    (tmp_path / "old.json").write_text("")
    (tmp_path / "old.json").chmod(mode)
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "old.json", "text")
        files.write_text(tmp_path / "new.json", "text")
    finally:
        os.umask(before)

    assert (mode_of(tmp_path / "old.json"), mode_of(tmp_path / "new.json")) == (mode, 0o640)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("old")

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "run.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.json", "old")]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0")
    (tmp_path / ".run.json.0.tmp").symlink_to(tmp_path / "victim")

    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "run.json", "text")
    assert not (tmp_path / "victim").exists()


def test_a_lone_surrogate_is_written_as_json_spells_it(tmp_path):
    text = json.dumps({"name": "a\ud800b\udc80é"}, ensure_ascii=False)
    files.write_text(tmp_path / "run.json", text)

    assert (tmp_path / "run.json").read_bytes() == b'{"name": "a\\ud800b\\udc80\xc3\xa9"}'
    assert json.loads(files.read_text(tmp_path / "run.json")) == json.loads(text)


def test_the_longest_file_name_is_written(tmp_path):
    path = tmp_path / ("é" * 127)
    files.write_text(path, "text")

    assert path.read_text() == "text"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_only_regular_files_are_read(tmp_path, make):
    make(tmp_path / "run.json")

    with pytest.raises(OSError, match="only a regular file is read"):
        files.read_text(tmp_path / "run.json")


def test_a_folder_is_neither_read_nor_written(tmp_path):
    for use in (files.read_text, lambda path: files.write_text(path, "")):
        with pytest.raises(IsADirectoryError):
            use(tmp_path)


def test_a_long_name_is_shortened_with_a_hash_that_tells_two_apart():
    one, other = files.short_name("é" * 100 + "1"), files.short_name("é" * 100 + "2")

    assert one != other
    assert all(len(name.encode()) <= 80 for name in (one, other))
    assert files.short_name("é" * 40) == "é" * 40

"""Packages on disk: whole or not at all, one builder at a time, not without end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudagraph.compile.cache import PackageCache
from pytest_cudagraph.errors import CudagraphError


@pytest.fixture
def put(tmp_path):
    def put(cache, key, content=b"package"):
        with cache.build_folder() as folder:
            built = folder / "package.pt2"
            built.write_bytes(content)
            return cache.store(key, built)

    return put


def test_what_is_stored_is_found_and_whole(tmp_path, put):
    cache = PackageCache(tmp_path / "aot")
    path = put(cache, "k")
    assert (cache.find("k"), cache.is_damaged("k")) == (path, False)
    assert path.read_bytes() == b"package"


def test_what_was_never_stored_is_neither_found_nor_damaged(tmp_path):
    cache = PackageCache(tmp_path / "aot")
    assert (cache.find("k"), cache.is_damaged("k")) == (None, False)


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b"packagE"), lambda path: path.with_suffix(".sha256").unlink()]
)
def test_other_bytes_or_a_lost_checksum_are_damage_until_stored_anew(damage, tmp_path, put):
    cache = PackageCache(tmp_path / "aot")
    damage(put(cache, "k"))
    assert cache.is_damaged("k")
    put(cache, "k")
    assert not cache.is_damaged("k")


def test_only_the_newest_are_kept_and_use_keeps_new(tmp_path, put):
    cache = PackageCache(tmp_path / "aot", max_packages=2)
    for age, key in enumerate("ab"):
        os.utime(put(cache, key), (age, age))
    cache.find("a")
    put(cache, "c")
    assert [key for key in "abc" if cache.find(key)] == ["a", "c"]
    assert sorted(path.name for path in (tmp_path / "aot").iterdir()) == [
        ".gitignore", "a.pt2", "a.sha256", "c.pt2", "c.sha256",
    ]  # fmt: skip


def test_a_second_process_waits_no_longer_than_it_may(tmp_path):
    cache = PackageCache(tmp_path / "aot")
    other = PackageCache(tmp_path / "aot")
    with cache.locked("k", 1.0):
        with pytest.raises(TimeoutError, match=r"another process is building .*k\.pt2"), other.locked("k", 0.0):
            pass
        with other.locked("another", 0.0):
            pass
    with other.locked("k", 0.0):
        pass


def test_packages_stay_out_of_version_control(tmp_path):
    with PackageCache(tmp_path / "aot").build_folder():
        pass
    assert (tmp_path / "aot" / ".gitignore").read_text() == "*\n"
    assert [path.name for path in (tmp_path / "aot").iterdir()] == [".gitignore"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CudagraphError) as raised, PackageCache(tmp_path / "file" / "aot").build_folder():
        pass
    reason = "Not a directory" if sys.platform != "win32" else "The system cannot find the path specified"
    assert str(raised.value) == (
        f"compile='aot' keeps packages in {tmp_path / 'file' / 'aot'}, which cannot be written: {reason}\n"
        "  to fix: make it writable, or use compile='inductor'"
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_cudagraph.compile.cache import PackageCache
with PackageCache(Path(sys.argv[1])).build_folder() as folder:
    (folder / "program.pt2").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_build_is_removed_by_the_next_one_and_a_running_or_foreign_one_is_not(tmp_path):
    folder = tmp_path / "aot"
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert len(list(folder.glob("building-*/program.pt2"))) == 1
    (folder / "building-site").mkdir()
    with PackageCache(folder).build_folder() as running:
        with PackageCache(folder).build_folder() as other:
            assert running.is_dir()
            assert {path.name for path in folder.glob("building-*") if path.is_dir()} == {
                running.name, other.name, "building-site",
            }  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == [".gitignore", "building-site"]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_what_is_built_belongs_to_the_user_alone_whatever_the_umask(tmp_path, put):
    before = os.umask(0)
    try:
        path = put(PackageCache(tmp_path / "aot"), "k")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert PackageCache(tmp_path / "aot").find("k") == path


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_package_that_others_can_write_is_refused(tmp_path, put, mode):
    cache = PackageCache(tmp_path / "aot")
    path = put(cache, "k")
    path.chmod(mode)
    with pytest.raises(CudagraphError) as raised:
        cache.find("k")
    shown = {0o620: "-rw--w----", 0o602: "-rw-----w-"}[mode]
    assert str(raised.value) == (
        f"compile='aot' runs code from packages that only this user (id {os.geteuid()}) can write; found {path} of "
        f"user {os.geteuid()} with permissions {shown}\n  to fix: remove {path}; what is missing is built again"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_folder_or_package_of_another_user_is_refused(tmp_path, put, monkeypatch):
    cache = PackageCache(tmp_path / "aot")
    put(cache, "k")
    monkeypatch.setattr(os, "geteuid", lambda: Path(tmp_path).stat().st_uid + 1)
    with pytest.raises(CudagraphError, match=r"found .*k\.pt2 of user"):
        cache.find("k")
    with pytest.raises(CudagraphError, match=r"found .*aot of user"), cache.build_folder():
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_folder_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "aot").mkdir()
    (tmp_path / "aot").chmod(0o777)
    cache = PackageCache(tmp_path / "aot")
    for use in (cache.build_folder, lambda: cache.locked("k", 1.0)):
        with pytest.raises(CudagraphError, match=r"found .*aot of user .* with permissions drwxrwxrwx"), use():
            pass

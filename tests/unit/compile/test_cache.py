"""Packages on disk: whole or not at all, one builder at a time, not without end."""

from __future__ import annotations

import os
import sys

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

"""Baselines in an object store: writers lose nothing, no credential is shown, a dead store is an error."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from tests.facts import CPU, H200, by_key, saved

from pytest_cudagraph.baseline import Edit, JsonStore, any_path, json_files, remote, remove_from
from pytest_cudagraph.cli import main
from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.foreign import without_credentials

fsspec = pytest.importorskip("fsspec")

FOLDER = "memory://bucket/baselines"
WRITERS = 8


@pytest.fixture(autouse=True)
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = ["", "/bucket"]
    return system


@pytest.fixture
def kept():
    return JsonStore(FOLDER, H200)


def test_what_is_written_is_read_and_no_lock_stays(kept, memory):
    assert kept.load() == {}
    kept.merge([saved("a"), saved("b")], commit_info={})
    JsonStore(FOLDER, CPU).merge([saved("c", device=CPU)], commit_info={})
    remove_from(kept.path, [("b", 8)])

    assert kept.load() == by_key(saved("a"))
    assert [path.name for path in json_files(any_path(FOLDER))] == ["cpu-amd-epyc-9b45.json", "nvidia-h200.json"]
    assert memory.find("/bucket") == [f"/bucket/baselines/{path.name}" for path in json_files(any_path(FOLDER))]
    remove_from(kept.path, [("a", 8)])
    assert not kept.path.exists()


def write(folder, number):
    JsonStore(folder, H200).update(lambda _: Edit([saved(f"test-{number}")]), commit_info={})


def test_writers_lose_nothing_of_each_other(kept, request):
    # Without this each thread would end before the next begins.
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, [FOLDER] * WRITERS, range(WRITERS)))

    assert sorted(name for name, _ in kept.load()) == [f"test-{number}" for number in range(WRITERS)]


def test_a_lock_that_stays_is_an_error_that_names_it(kept, memory, monkeypatch):
    monkeypatch.setattr(remote, "LOCK_WAIT_S", 0.0)
    memory.pipe_file("/bucket/baselines/.nvidia-h200.json.lock", b"")

    with pytest.raises(BaselineError, match=r"its lock memory://\S+/.nvidia-h200.json.lock was held for 0 s"):
        kept.merge([saved("a")], commit_info={})
    assert kept.load() == {}


def test_two_requests_for_the_lock_at_once_are_a_lock_that_is_held(kept, memory, monkeypatch):
    real, refusals = type(memory).pipe_file, ["cannot succeed due to a conflicting operation against this resource"]

    def refuse_once(system, path, value, mode="overwrite"):
        if refusals:
            raise OSError(f"The conditional request {refusals.pop()}.")
        real(system, path, value, mode=mode)

    monkeypatch.setattr(remote, "_RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(type(memory), "pipe_file", refuse_once)
    kept.merge([saved("a")], commit_info={})
    assert kept.load() == by_key(saved("a"))


def test_a_store_that_dies_between_read_and_write_is_unchanged_and_unlocked(kept, memory, monkeypatch):
    kept.merge([saved("a")], commit_info={})
    before = memory.cat_file(kept.path.path)
    real = type(memory).pipe_file

    def die(system, path, value, mode="overwrite"):
        if mode != "create":
            raise ConnectionResetError("the store went away")
        real(system, path, value, mode=mode)

    monkeypatch.setattr(type(memory), "pipe_file", die)
    with pytest.raises(
        BaselineError, match=r"nvidia-h200.json: cannot be written \(the store went away\); nothing was"
    ):
        kept.merge([saved("b")], commit_info={})
    assert memory.cat_file(kept.path.path) == before
    assert memory.find("/bucket") == ["/bucket/baselines/nvidia-h200.json"]


class HalfWritten(fsspec.get_filesystem_class("memory")):
    """Most file systems write in place: an error in between leaves a part."""

    protocol = "half"

    def pipe_file(self, path, value, mode="overwrite"):
        super().pipe_file(path, value[: len(value) // 2] if self.fails else value, mode=mode)
        if self.fails and mode != "create":
            raise ConnectionResetError("the store went away")


@pytest.mark.parametrize("fails", [True, False])
def test_a_store_that_writes_in_place_keeps_the_whole_file_too(memory, fails):
    system = HalfWritten()
    system.fails = False
    kept = JsonStore(remote.RemotePath(system, "/bucket/baselines", "half://bucket/baselines"), H200)
    kept.merge([saved("a")], commit_info={})
    system.fails = fails
    with pytest.raises(BaselineError, match="nothing was changed") if fails else contextlib.nullcontext():
        kept.merge([saved("b")], commit_info={})
    assert kept.load() == by_key(saved("a"), *([] if fails else [saved("b")]))
    assert system.find("/bucket") == ["/bucket/baselines/nvidia-h200.json"]


@pytest.mark.parametrize(
    ("url", "may_create", "told"),
    [
        ("memory://nobucket/x", False, "its bucket .* does not exist"),
        ("memory://nobucket/x", True, "its bucket .* does not exist"),
        ("memory://ann:secret@nobucket/x", True, r"^memory://\*\*\*@nobucket/x: its bucket"),
        ("memory://bucket/new", False, "memory://bucket/new: the store has no such folder: correct the URL; to make"),
        ("memory://bucket/new", True, None),
        ("memory://bucket", False, None),
    ],
)
def test_a_place_that_a_store_lacks_is_an_error_and_an_update_may_make_a_folder(url, may_create, told):
    with pytest.raises(BaselineError, match=told) if told else contextlib.nullcontext() as caught:
        any_path(url).require(may_create=may_create)
    assert "secret" not in str(caught.value if told else "")


def test_credentials_that_may_not_list_do_not_make_a_place_missing():
    def refuse(*args, **kwargs):
        raise PermissionError("AccessDenied")

    system = SimpleNamespace(ls=refuse, invalidate_cache=lambda: None)
    remote.RemotePath(system, "/bucket/x", "s3://bucket/x").require(may_create=False)


def test_an_error_of_a_store_that_cannot_be_printed_is_still_one_of_ours():
    class Unprintable(OSError):
        def __str__(self):
            raise ValueError("no text")

    def refuse(*args, **kwargs):
        raise Unprintable

    kept = JsonStore(remote.RemotePath(SimpleNamespace(cat_file=refuse), "/bucket/x", "s3://bucket/x"), H200)
    with pytest.raises(BaselineError, match="s3://bucket/x"):
        kept.load()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nostore://ann:secret@host/folder", r"nostore://\*\*\*@host/folder: cannot be used"),
        ("ftp://ann:secret@127.0.0.1:9/folder", r"ftp://\*\*\*@127.0.0.1:9/folder\S*: can"),
        ("https://127.0.0.1:9/folder?sig=secret", r"https://127.0.0.1:9/folder/\S+\?\*\*\*: can"),
    ],
)
def test_no_credential_is_shown(url, shown):
    with pytest.raises(BaselineError, match=shown) as caught:
        JsonStore(url, H200).load()
    assert "secret" not in str(caught.value)


def test_a_url_that_the_store_does_not_find_is_shown_without_its_credentials():
    def not_found(*args, **kwargs):
        raise FileNotFoundError("https://host/folder?sig=secret")

    system = SimpleNamespace(cat_file=not_found, pipe_file=not_found)
    kept = JsonStore(remote.RemotePath(system, "/folder", "https://host/folder?sig=secret"), H200)
    assert kept.load() == {}
    with pytest.raises(
        BaselineError,
        match=r"^https://host/folder/nvidia-h200.json\?\*\*\*: cannot be written \(https://host/folder\?\*\*\*\)",
    ) as caught:
        kept.merge([saved("a")], commit_info={})
    assert "secret" not in str(caught.value)


def test_a_password_is_hidden_as_it_is_decoded_too_and_from_a_debugger():
    url = "s3://ann:s%40cret@host/folder"
    assert without_credentials("no login of ann with s@cret", url) == "no login of *** with ***"
    assert "cret" not in repr(remote.RemotePath(None, "host/folder", url))


def test_a_file_url_is_a_path(tmp_path):
    assert any_path(tmp_path.as_uri()) == tmp_path
    assert any_path("folder").name == "folder"


def test_the_command_takes_urls(kept, tmp_path, capsys):
    JsonStore(tmp_path, H200).merge([saved("a")], commit_info={})
    assert main(["baseline", "merge", str(tmp_path), "-o", FOLDER]) == 0
    assert main(["baseline", "list", FOLDER]) == 0
    assert main(["compare", f"{FOLDER}/nvidia-h200.json", str(tmp_path / "nvidia-h200.json")]) == 0
    assert main(["baseline", "prune", FOLDER, "--name", "a"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {FOLDER}/nvidia-h200.json: 1 entry" in out
    assert f"removed from {FOLDER}/nvidia-h200.json: a, batch 8" in out


@pytest.fixture
def bucket(monkeypatch):
    """A server of S3's protocol on this machine, with the bucket ``bucket``."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    # By default a dead server is asked again for some seconds.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    with contextlib.suppress(AttributeError):
        server.stop()


@pytest.mark.slow
def test_writers_lose_nothing_of_each_other_in_a_real_object_store(bucket):
    folder = "s3://bucket/baselines"
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, [folder] * WRITERS, range(WRITERS)))

    kept = JsonStore(folder, H200)
    assert sorted(name for name, _ in kept.load()) == [f"test-{number}" for number in range(WRITERS)]
    assert [path.name for path in json_files(any_path(folder))] == ["nvidia-h200.json"]
    bucket.stop()
    with pytest.raises(BaselineError, match=r"s3://bucket/baselines/nvidia-h200.json: cannot be read"):
        kept.load()
    with pytest.raises(BaselineError, match=r"s3://bucket/baselines/nvidia-h200.json: cannot be read"):
        write(folder, 0)

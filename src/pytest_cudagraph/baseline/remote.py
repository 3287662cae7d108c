"""Baseline files in an object store: any file system of fsspec, given as a URL.

A writer holds a lock object next to its file, which only one writer can create. fsspec calls this the mode ``create``:
``If-None-Match`` on S3, generation 0 on Google Cloud Storage. A lock is never broken, because two writers could break
it at once and lose the entries of one.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pytest_cudagraph.errors import BaselineError
from pytest_cudagraph.foreign import message_of, without_credentials

LOCK_WAIT_S = 60.0
"""A writer holds a lock for some requests, and as many may wait as a project has jobs."""

_RETRY_S = (0.05, 0.3)

_WRITE_WHOLE = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"))
"""Protocols of stores that write an object whole or not at all."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A folder or a file of a file system of fsspec, with those methods of a :class:`Path` that baselines need.

    What the file system raises becomes an :class:`OSError` that shows no credentials.
    """

    system: Any
    path: str
    url: str = field(repr=False)
    """With its credentials. The text of this object shows none."""

    @classmethod
    def of(cls, url: str) -> RemotePath:
        """Raises :class:`~pytest_cudagraph.errors.BaselineError` if no installed file system takes the URL."""
        try:
            from fsspec.core import url_to_fs

            system, path = url_to_fs(url)
        # Each file system raises what it likes.
        except Exception as error:
            reason = without_credentials(message_of(error), url)
            raise BaselineError(
                f"{without_credentials(url)}: cannot be used ({reason}); "
                "s3:// needs s3fs, gs:// needs gcsfs (pip install s3fs)"
            ) from None
        return cls(system, path.rstrip("/"), url.rstrip("/"))

    def __str__(self) -> str:
        return without_credentials(self.url)

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> RemotePath:
        folder, mark, query = self.url.partition("?")
        return RemotePath(self.system, f"{self.path}/{name}", f"{folder}/{name}{mark}{query}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.removesuffix(".json")

    @property
    def parent(self) -> RemotePath:
        url, mark, query = self.url.partition("?")
        return RemotePath(self.system, self.path.rpartition("/")[0], f"{url.rpartition('/')[0]}{mark}{query}")

    def is_dir(self) -> bool:
        """By the name, because an object store has no folders."""
        return not self.name.endswith(".json")

    def require(self, *, may_create: bool) -> None:
        """Raises :class:`~pytest_cudagraph.errors.BaselineError` if the store has no such folder.

        With ``may_create`` only the bucket must exist: a writer makes the folder.
        """
        bucket = self.path[: self.path.find("/", 1)] if "/" in self.path[1:] else self.path
        if not self._is_there(bucket):
            raise BaselineError(
                f"{self}: its bucket (the first part of the path) does not exist: make it, or correct the URL"
            )
        if not may_create and not self._is_there(self.path):
            raise BaselineError(
                f"{self}: the store has no such folder: correct the URL; "
                "to make it: pytest --cudagraph --cudagraph-update with this --cudagraph-baseline"
            )

    def _is_there(self, path: str) -> bool:
        self.system.invalidate_cache()
        # Credentials may allow less than listing. Then reading says what is wrong.
        with contextlib.suppress(OSError), self._no_credentials():
            try:
                self.system.ls(path, detail=False)
            except FileNotFoundError:
                return False
        return True

    def exists(self) -> bool:
        """Raises :class:`~pytest_cudagraph.errors.BaselineError` if the store does not answer."""
        try:
            return bool(self.read_bytes())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise BaselineError(f"{self}: cannot be read ({error})") from error

    def json_files(self) -> list[RemotePath]:
        """The JSON files of this folder."""
        with self._no_credentials(), contextlib.suppress(FileNotFoundError):
            self.system.invalidate_cache()
            names = [str(each).rpartition("/")[2] for each in self.system.ls(self.path, detail=False)]
            return [self / name for name in sorted(names) if name.endswith(".json")]
        return []

    def read_bytes(self) -> bytes:
        with self._no_credentials():
            return bytes(self.system.cat_file(self.path))

    def write_text(self, text: str) -> None:
        """Replace the file whole or not at all. An object store does so; elsewhere a new file takes its place."""
        data = text.encode("utf-8", errors="backslashreplace")
        with self._no_credentials():
            if _WRITE_WHOLE.intersection(_protocols(self.system)):
                self.system.pipe_file(self.path, data)
                return
            beside = f"{self.path}.{secrets.token_hex(4)}.tmp"
            try:
                self.system.pipe_file(beside, data)
                self.system.mv(beside, self.path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self.system.rm_file(beside)
                raise

    def unlink(self) -> None:
        with self._no_credentials(), contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this file. Raises :class:`~pytest_cudagraph.errors.BaselineError` after a minute."""
        lock = self.parent / f".{self.name}.lock"
        until = time.monotonic() + LOCK_WAIT_S
        while not lock.create(f"{socket.gethostname()}, process {os.getpid()}"):
            if time.monotonic() > until:
                raise BaselineError(
                    f"{self}: its lock {lock} was held for {LOCK_WAIT_S:.0f} s; if no run writes there, one died: "
                    "remove that object"
                )
            time.sleep(random.uniform(*_RETRY_S))
        try:
            yield
        finally:
            # An unreachable store keeps it. The next writer says so.
            with contextlib.suppress(OSError):
                lock.unlink()

    def create(self, text: str) -> bool:
        """Write an object that does not exist, or say that it does."""
        with self._no_credentials():
            try:
                self.system.pipe_file(self.path, text.encode(), mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # S3 refuses one of two simultaneous requests as "conditional request ... conflicting operation".
                if "conditional request" not in message_of(error):
                    raise
                return False
        return True

    @contextlib.contextmanager
    def _no_credentials(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            reason = message_of(error) or type(error).__name__
            raise kind(without_credentials(reason, self.url)) from None


def _protocols(system: Any) -> tuple[str, ...]:
    protocol = system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


AnyPath: TypeAlias = Path | RemotePath
"""Where baselines are: on this machine, or in an object store."""


def any_path(text: str) -> AnyPath:
    """A path, or the place of a URL. ``file://`` is a path. Raises :class:`~pytest_cudagraph.errors.BaselineError`."""
    if text.startswith("file://"):
        return Path(url2pathname(urlsplit(text).path))
    return RemotePath.of(text) if "://" in text else Path(os.path.expanduser(text))

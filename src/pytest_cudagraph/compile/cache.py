"""Ahead-of-time packages on disk: found by content, checked before use, built once however many processes ask."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_cudagraph.errors import CudagraphError

MAX_PACKAGES = 64
"""A package holds the model's weights: a folder that is never cleared would fill the disk of a build machine."""


class PackageCache:
    """A folder of ``<key>.pt2`` files, each with the checksum it was stored with."""

    def __init__(self, folder: Path, max_packages: int = MAX_PACKAGES) -> None:
        self._folder = folder
        self._max_packages = max_packages

    @contextmanager
    def locked(self, key: str, timeout_s: float) -> Iterator[None]:
        """Keep other processes from building the same package; :class:`TimeoutError` when one keeps this one out."""
        self._create_folder()
        lock = FileLock(self._folder / f"{key}.lock")
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise TimeoutError(f"another process is building {self._folder / key}.pt2") from None
        try:
            yield
        finally:
            lock.release()

    def find(self, key: str) -> Path | None:
        """The stored package, or None; whether it is whole, :meth:`is_damaged` tells."""
        package = self._package(key)
        if not package.exists():
            return None
        os.utime(package)  # the oldest are dropped first, and this one is in use
        return package

    def is_damaged(self, key: str) -> bool:
        """Whether a package is there whose bytes are not those that were stored."""
        package, checksum = self._package(key), self._checksum(key)
        if not package.exists():
            return False
        return not checksum.exists() or checksum.read_text(encoding="ascii") != _sha256(package)

    def store(self, key: str, built: Path) -> Path:
        """Move a freshly built package in, whole or not at all, and drop the oldest beyond the limit."""
        package, checksum = self._package(key), self._checksum(key)
        written = built.with_suffix(".sha256")
        written.write_text(_sha256(built), encoding="ascii")
        # The checksum goes first: a crash in between leaves a pair that does not match, and so is rebuilt.
        written.replace(checksum)
        built.replace(package)
        self._drop_oldest()
        return package

    @contextmanager
    def workshop(self) -> Iterator[Path]:
        """A new folder on the same file system, so that :meth:`store` is a rename; gone afterwards."""
        self._create_folder()
        folder = Path(tempfile.mkdtemp(prefix="building-", dir=self._folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _create_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # The folder lies beside baselines, which are committed; packages are not.
            (self._folder / ".gitignore").write_text("*\n", encoding="ascii")
        except OSError as exc:
            raise CudagraphError(
                f"packages of compile='aot' are kept in {self._folder}, which cannot be written: {exc.strerror}\n"
                f"  to fix: make it writable, or use compile='inductor'"
            ) from exc

    def _drop_oldest(self) -> None:
        packages = sorted(self._folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime, reverse=True)
        for package in packages[self._max_packages :]:
            package.unlink(missing_ok=True)
            self._checksum(package.stem).unlink(missing_ok=True)

    def _package(self, key: str) -> Path:
        return self._folder / f"{key}.pt2"

    def _checksum(self, key: str) -> Path:
        return self._folder / f"{key}.sha256"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

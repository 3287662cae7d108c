"""The cache of packages on disk: found by content, verified before use, built by one process at a time."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pickle
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from pytest_cudagraph import environment
from pytest_cudagraph.errors import CudagraphError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FORMAT = "1"
_OWN_SOURCE = "triton_kernel_wrapper"  # such a node holds the number of a kernel, not its source
_IRRELEVANT = ("compile_threads", "worker", "log", "quiesce", "verbose", "progress")


def content_key(program: ExportedProgram, *, device: str, options: Mapping[str, Any]) -> str | None:
    """A hex digest that is equal only for packages that compute the same. None if the graph cannot be hashed."""
    text = _graph_text(program)
    constants = {**program.state_dict, **program.constants}
    if _OWN_SOURCE in text or not all(_is_hashable(value) for value in constants.values()):
        return None
    digest = hashlib.sha256()
    for part in (_FORMAT, text, _inputs_text(program), machine_text(device), options_text(options)):
        digest.update(part.encode(errors="surrogatepass") + b"\0")
    for name, tensor in sorted(constants.items()):
        digest.update(f"{name} {_layout_text(tensor)}\0".encode())
        _update_with_bytes(digest, tensor)
    return digest.hexdigest()


def compile_options() -> dict[str, Any]:
    """Inductor's configuration of this process, as far as it can be pickled for another process."""
    from torch._inductor import config

    return {name: value for name, value in config.save_config_portable().items() if _can_travel(value)}


def machine_text(device: str) -> str:
    """What generated code depends on besides graph and options: PyTorch, the processor, settings of this process."""
    on_cuda = torch.device(device).type == "cuda"
    gpu = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}" if on_cuda else "cpu"
    return "\n".join(
        (
            f"torch {torch.__version__} {torch.version.git_version} {torch.version.cuda}",
            f"{device} {gpu}",
            f"{environment.host_cpu_name()} {torch.backends.cpu.get_cpu_capability()}",
            # Inductor writes the number of threads into the loops of its C++ code.
            f"threads {torch.get_num_threads()} matmul {torch.get_float32_matmul_precision()}",
            f"deterministic {torch.are_deterministic_algorithms_enabled()} dtype {torch.get_default_dtype()}",
        )
    )


def _graph_text(program: ExportedProgram) -> str:
    graphs = [
        f"{name}\n{module.graph}"
        for name, module in program.graph_module.named_modules()
        if isinstance(module, torch.fx.GraphModule)
    ]
    return "\n".join([*graphs, str(program.graph_signature)])


def _inputs_text(program: ExportedProgram) -> str:
    arguments: Iterable[Any] = program.example_inputs[0] if program.example_inputs else ()
    return "\n".join(_layout_text(each) if isinstance(each, torch.Tensor) else repr(each) for each in arguments)


def options_text(options: Mapping[str, Any]) -> str:
    """The options that generated code depends on."""
    kept = {name: value for name, value in options.items() if not any(word in name for word in _IRRELEVANT)}
    return "\n".join(f"{name}={value!r}" for name, value in sorted(kept.items()))


def _layout_text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _is_hashable(value: object) -> bool:
    """Whether the bytes of a tensor define it. Subclasses and sparse layouts hold more than bytes."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _update_with_bytes(digest: Any, tensor: torch.Tensor) -> None:
    # Bytes in logical order, so that the storage and the offset of a view do not matter.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        size_bytes = flat.numel() * flat.element_size()
        # Without a copy, and without numpy, which is not a dependency.
        digest.update((ctypes.c_char * size_bytes).from_address(flat.data_ptr()))


def _can_travel(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


MAX_PACKAGES = 64
"""A package holds the weights of a model. Without a limit the folder would fill the disk."""


class PackageCache:
    """A folder of ``<key>.pt2`` files, each with its checksum in ``<key>.sha256``."""

    def __init__(self, folder: Path, max_packages: int = MAX_PACKAGES) -> None:
        self._folder = folder
        self._max_packages = max_packages

    @contextmanager
    def locked(self, key: str, timeout_s: float) -> Iterator[None]:
        """Lock this package against other processes. Raises :class:`TimeoutError` if another one holds the lock."""
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
        """The stored package, or None. See :meth:`is_damaged` for its content.

        Raises :class:`~pytest_cudagraph.errors.CudagraphError` for one that another user could have written.
        """
        package = self._package(key)
        if not package.exists():
            return None
        _require_private(package)
        os.utime(package)  # the oldest are removed first, and this one is in use
        return package

    def is_damaged(self, key: str) -> bool:
        """Whether there is a package that does not match its checksum."""
        package, checksum = self._package(key), self._checksum(key)
        if not package.exists():
            return False
        return not checksum.exists() or checksum.read_text(encoding="ascii") != _sha256(package)

    def store(self, key: str, built: Path) -> Path:
        """Move a new package in as one step, and remove the oldest beyond the limit."""
        package, checksum = self._package(key), self._checksum(key)
        written = built.with_suffix(".sha256")
        written.write_text(_sha256(built), encoding="ascii")
        # The checksum first: after a crash in between the pair does not match, and the package is rebuilt.
        built.chmod(0o600)
        written.replace(checksum)
        built.replace(package)
        self._drop_oldest()
        return package

    @contextmanager
    def build_folder(self) -> Iterator[Path]:
        """A temporary folder on the same file system, so that :meth:`store` is a rename."""
        self._create_folder()
        self._remove_dead_builds()
        folder = self._folder / f"building-{secrets.token_hex(8)}"
        # Locked before there is a folder, and as long as there is one: a folder without a holder is of a killed build.
        with FileLock(f"{folder}.lock"):
            folder.mkdir(mode=0o700)
            try:
                yield folder
            finally:
                _remove_build(folder)

    def _remove_dead_builds(self) -> None:
        """Remove what killed builds left. The lock of a running build is held, also by another container."""
        for lock in self._folder.glob("building-*.lock"):
            with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
                _remove_build(lock.with_suffix(""))

    def _create_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Baselines in the same folder are committed, packages are not.
            (self._folder / ".gitignore").write_text("*\n", encoding="ascii")
        except OSError as exc:
            raise CudagraphError(
                f"compile='aot' keeps packages in {self._folder}, which cannot be written: {exc.strerror}\n"
                f"  to fix: make it writable, or use compile='inductor'"
            ) from exc
        _require_private(self._folder)

    def _drop_oldest(self) -> None:
        packages = sorted(self._folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime, reverse=True)
        for package in packages[self._max_packages :]:
            package.unlink(missing_ok=True)
            self._checksum(package.stem).unlink(missing_ok=True)

    def _package(self, key: str) -> Path:
        return self._folder / f"{key}.pt2"

    def _checksum(self, key: str) -> Path:
        return self._folder / f"{key}.sha256"


def _remove_build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.lock").unlink(missing_ok=True)


def _require_private(path: Path) -> None:
    """Raise :class:`CudagraphError` unless only this user can write there: a package is code that this process runs."""
    if not hasattr(os, "geteuid"):
        return
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CudagraphError(
            f"compile='aot' runs code from packages that only this user (id {os.geteuid()}) can write; found {path} "
            f"of user {status.st_uid} with permissions {stat.filemode(status.st_mode)}\n"
            f"  to fix: remove {path}; what is missing is built again"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

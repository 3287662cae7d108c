"""The machine and the commit under test, for the report and for baseline files."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_cudagraph.errors import DeviceUnavailable

_GIT_TIMEOUT_S = 10
"""``git status`` of a large tree on a network file system takes seconds. A run must not hang."""

GIT = ("git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
"""Programs that the configuration of a repository names for these are not started."""

_GIT_LOCALS = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG",
        "GIT_DIR",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_INTERNAL_SUPER_PREFIX",
        "GIT_NO_REPLACE_OBJECTS",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_REFERENCE_BACKEND",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    }
)
"""The variables that ``git rev-parse --local-env-vars`` lists. Git sets some of them for its hooks.

Without ``GIT_CONFIG_COUNT`` and ``GIT_CONFIG_PARAMETERS``, which a build server may use to declare a folder safe.
"""

_SHOWN_COMMIT = re.compile(r"^([0-9a-f]{40,64})\n(\d{4}-\S+)\n(\d{4}-\S+)$", re.MULTILINE)


def host_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``Intel(R) Xeon(R) Platinum 8480C``, or Python's name for the processor if the system names no model."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", text, re.MULTILINE)
    name = named.group(1) if named else platform.processor() or platform.machine()
    return " ".join(name.split()) or "unknown CPU"


def python_version() -> str:
    """``3.12.4``."""
    return platform.python_version()


def require_torch() -> None:
    """Raise :class:`~pytest_cudagraph.errors.DeviceUnavailable` if PyTorch cannot be imported."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise DeviceUnavailable(
            f"pytest-cudagraph needs PyTorch, which {sys.executable} cannot import ({error}): "
            "install torch there, or run pytest with -p no:cudagraph"
        ) from None


def torch_version() -> str:
    """``2.11.0+cu128``."""
    # Late, so that a run that does not use this plugin never imports torch.
    import torch

    return str(torch.__version__)


def platform_text() -> str:
    """``Linux-6.8.0-x86_64-with-glibc2.39``."""
    return platform.platform()


def commit(root: Path) -> dict[str, Any] | None:
    """The commit checked out at ``root``, in the format of pytest-benchmark's ``commit_info``.

    None where there is no git, no repository or no commit. Raises nothing. Untracked files do not count as changes.
    """
    # Git may print other lines too (log.showSignature).
    shown = _SHOWN_COMMIT.search(git(root, "log", "-1", "--no-show-signature", "--format=%H%n%cI%n%aI") or "")
    if shown is None:
        return None
    changes = git(root, "status", "--porcelain", "--untracked-files=no")
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    identity, committed_at, authored_at = shown.groups()
    return {
        "id": identity,
        "time": committed_at,
        "author_time": authored_at,
        # Without a status the tree counts as changed.
        "dirty": changes != "",
        "project": _project(root),
        "branch": "(detached head)" if branch == "HEAD" else branch or "(unknown)",
    }


def without_git_locals() -> dict[str, str]:
    """This process's environment without git's variables, so that git finds the repository of its folder.

    In a hook these variables name the repository and the index of the commit in progress. A git that runs in another
    folder would read and write those.
    """
    return {name: value for name, value in os.environ.items() if name not in _GIT_LOCALS}


def _project(root: Path) -> str:
    """The name of the repository at its remote, or of its folder."""
    remote = git(root, "config", "--get", "remote.origin.url") or ""
    name = re.split(r"[/:\\]", remote.rstrip("/"))[-1].removesuffix(".git")
    return name or Path(git(root, "rev-parse", "--show-toplevel") or root).name


def git(root: Path, *arguments: str) -> str | None:
    """The stripped output of git in a folder, or None if it fails."""
    # Do not take a lock that the user's own git may need.
    command = [*GIT, "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, env=without_git_locals()
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace").strip()


def start_nvml() -> Any:
    """The initialised module ``pynvml``, or a str with the reason why NVML does not start."""
    try:
        import pynvml
    except ImportError as error:
        return str(error)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return pynvml


def stop_nvml(nvml: Any) -> None:
    """Shut NVML down and ignore its error."""
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()

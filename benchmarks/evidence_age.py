"""One line: how old the newest evidence of a GPU is, in terms of the source it measured. Never a failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.gpu_evidence import evidence, tree  # noqa: E402

_SHOWN = 10
"""Digits of a hash."""


def age(root: Path) -> str:
    """``GPU evidence: stale since <commit>, 14 files``; ``current`` or ``none yet`` where that is so."""
    try:
        newest = evidence.newest(root / "benchmarks" / "evidence")
    except evidence.ForeignEvidence as error:
        return f"GPU evidence: unreadable: {error}"
    if newest is None:
        return "GPU evidence: none yet"
    measured = str(newest["source"]["tree"])
    about = f"tree {measured[:_SHOWN]}, {newest['began_at'][:10]}, {newest['device']['name']}"
    if tree.tree_of(root / "src") == measured:
        return f"GPU evidence: current ({about})"
    return f"GPU evidence: stale since {_since(root, measured)} ({about})"


def _since(root: Path, measured: str) -> str:
    """The first commit whose ``src`` is no longer what was measured, and how many files differ by now."""
    commits = (tree.git(root, "log", "--format=%H", "--", "src") or "").splitlines()
    later = None
    for commit in commits:
        if tree.git(root, "rev-parse", f"{commit}:src") == measured:
            return f"{later[:_SHOWN] if later else 'the last commit'}, {_files(root, measured)}"
        later = commit
    return "an unknown commit: no commit of this history has that tree"


def _files(root: Path, measured: str) -> str:
    changed = (tree.git(root, "diff", "--name-only", measured, "HEAD:src") or "").splitlines()
    if not changed:
        return "files changed but not committed"
    return f"{len(changed)} file{'s' if len(changed) != 1 else ''}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(age(ROOT))

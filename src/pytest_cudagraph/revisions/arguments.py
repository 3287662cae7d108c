"""The words of a command line, as another copy of the repository is to read them."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SEPARATORS = re.compile(rf"([\s{re.escape(os.pathsep)}]+)")


def moved_argument(argument: str, top: Path, tree: Path) -> str:
    """The argument with each path below ``top`` moved to ``tree``: alone, behind an option, or in a list of paths.

    Paths are compared by their folders: ``/home/me/repo-data`` is no part of ``/home/me/repo``.
    """
    start = _start_of_path(argument)
    value = argument[start:]
    words = _SEPARATORS.split(value)
    # A folder's name may hold a space.
    if not all(Path(word).is_absolute() for word in words[::2]):
        words = [value]
    return argument[:start] + "".join(_moved_word(word, top, tree) for word in words)


def _start_of_path(argument: str) -> int:
    """Where an absolute path begins: in ``PATH``, ``-cPATH``, ``--opt=PATH``, ``name=PATH``; else the end."""
    short = [2] if re.match("-[A-Za-z]", argument) else []
    starts = [0, *short, *(sign.end() for sign in re.finditer("=", argument))]
    return next((start for start in starts if Path(argument[start:]).is_absolute()), len(argument))


def _moved_word(word: str, top: Path, tree: Path) -> str:
    file, colons, names = word.partition("::")
    path = Path(os.path.normpath(file))
    for above in (*reversed(path.parents), path) if Path(file).is_absolute() else ():
        # By whatever name the user reaches the repository; links within it stay links.
        if Path(os.path.realpath(above)) == top:
            return f"{tree / path.relative_to(above)}{colons}{names}"
    return word

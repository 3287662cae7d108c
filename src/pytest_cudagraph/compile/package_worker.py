"""The child process of :mod:`pytest_cudagraph.compile.packages`: packages what lies in the folder it is given."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import torch

from pytest_cudagraph.compile import packages
from pytest_cudagraph.errors import first_line


def main(folder: Path) -> int:
    """The exit code; what went wrong is left beside the program."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    order: packages.BuildOptions = pickle.loads((folder / packages.ORDER).read_bytes())
    try:
        program = torch.export.load(folder / packages.PROGRAM)
    except Exception:
        # Whatever the reason, the parent holds the program and can package it itself.
        return packages.LOADED_NOT
    try:
        packages.package(program, folder / packages.PACKAGE, order)
    except Exception as exc:
        # Translated into text, which is all that fits through an exit.
        (folder / packages.FAILURE).write_text(json.dumps(first_line(exc)), encoding="utf-8")
        return packages.FAILED
    return 0


def _die_with_parent() -> None:
    """End this process group as soon as the other end of standard input is closed: the parent was killed."""
    os.read(sys.stdin.fileno(), 1)  # not through the buffer, whose lock would keep the interpreter from ending
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

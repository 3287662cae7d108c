"""Find the line of the user's code that runs or raised. Findings point at it."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, NamedTuple

import torch

from pytest_cudagraph.values import Site

# Installed packages lie below the folder of the standard library, so match them first. The packages in _MACHINERY call
# tests and models. Every other installed package (transformers, timm) may be the code of a model.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_MACHINERY = frozenset({"_pytest", "pytest", "pluggy", "xdist", "execnet", "pytest_benchmark", "numpy", "functorch"})

# Code without a file, made by dataclasses, namedtuple or torch.fx. Cells of a notebook are the user's code.
_GENERATED = re.compile(r"<(?!stdin|ipython)")

_TORCH = Path(torch.__file__).parent
_THIS_PACKAGE = tuple(
    str(folder) + separator
    for folder in (Path(__file__).resolve().parents[1], Path(__file__).parents[1])
    for separator in ("/", "\\")
)
_OWN_FOLDERS = (*_THIS_PACKAGE, *(str(_TORCH) + separator for separator in ("/", "\\")))
# Where torch.compile is loaded, it wraps the methods of a dispatch mode.
_OBSERVERS = (*_THIS_PACKAGE, str(_TORCH / "_dynamo"), str(_TORCH / "_compile"))
_HIGHER_ORDER = str(_TORCH / "_higher_order_ops")
_STANDARD_LIBRARY = tuple(
    str(Path(sysconfig.get_paths()[key]).resolve()) + separator
    for key in ("stdlib", "platstdlib")
    for separator in ("/", "\\")
)


Origin = Literal["machinery", "library", "project"]


class Sites(NamedTuple):
    """The innermost user line. If it is in an installed library, also the project's line that led to it."""

    site: Site | None = None
    called_from: Site | None = None


def user_site() -> Site | None:
    """The innermost running line outside torch, pytest, this package and the standard library, or None.

    For an ``nn.Sequential`` of torch's modules it is the line that calls it.
    """
    frame = user_frame()
    return None if frame is None else _site_at(frame)


def user_sites() -> Sites:
    """The line of :func:`user_site`. If it is in a library, also the innermost line of the project that led to it."""
    frame = user_frame()
    if frame is None:
        return Sites()
    site = _site_at(frame)
    if origin_of(frame.f_code.co_filename) != "library":
        return Sites(site)
    outer: FrameType | None = frame
    while outer is not None and origin_of(outer.f_code.co_filename) != "project":
        outer = outer.f_back
    return Sites(site, None if outer is None else _site_at(outer))


def user_frame() -> FrameType | None:
    """The frame of :func:`user_site`. Do not keep it, because a frame keeps all its variables alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and origin_of(frame.f_code.co_filename) == "machinery":
        frame = frame.f_back
    return frame


def calling_frame() -> FrameType | None:
    """The innermost frame that runs code of the model, torch's included. Do not keep it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OBSERVERS):
        frame = frame.f_back
    return frame


def is_in_higher_order_operator() -> bool:
    """Whether the running call is of torch's own code for ``torch.cond`` and the like, which compiles its branches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and origin_of(frame.f_code.co_filename) == "machinery":
        if frame.f_code.co_filename.startswith(_HIGHER_ORDER):
            return True
        frame = frame.f_back
    return False


def user_site_of(exc: BaseException) -> Site | None:
    """The innermost user line of a traceback. For an error raised ``from`` another, the line of its cause."""
    for raised in reversed(list(_causes(exc))):
        site = _innermost(raised.__traceback__)
        if site is not None:
            return site
    return None


def raised_in_user_code(exc: BaseException) -> TracebackType | None:
    """The traceback from the first user line on. None unless a user line raised it."""
    first: TracebackType | None = None
    traceback, is_user = exc.__traceback__, False
    while traceback is not None:
        is_user = origin_of(traceback.tb_frame.f_code.co_filename) != "machinery"
        first = first or (traceback if is_user else None)
        traceback = traceback.tb_next
    return first if is_user else None


def describe(site: Site) -> str:
    """``model.py:20 in forward: return x.item()``. A path below the working folder is relative."""
    inside = f" in {site.function}" if site.function else ""
    text = linecache.getline(site.file, site.line).strip()
    return f"{site}{inside}{f': {text}' if text else ''}"


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    raised: BaseException | None = exc
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        yield raised
        raised = raised.__cause__


def _innermost(traceback: TracebackType | None) -> Site | None:
    found: Site | None = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if origin_of(code.co_filename) != "machinery":
            found = _site(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def _site_at(frame: FrameType) -> Site:
    return _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


# Cached: the layers of a model run the same few lines many times.
@functools.lru_cache(maxsize=4096)
def _site(file: str, line: int, function: str) -> Site:
    return Site(file=file, line=line, function=function)


# Cached: a capture asks for every frame of every operation. A process runs a few thousand files at most.
@functools.cache
def origin_of(file: str) -> Origin:
    """``machinery`` for torch, pytest, the standard library and this package, else ``library`` or ``project``."""
    if _GENERATED.match(file) or file.startswith(_OWN_FOLDERS):
        return "machinery"
    if library := library_of(file):
        return "machinery" if library in _MACHINERY else "library"
    return "machinery" if file.startswith(_STANDARD_LIBRARY) else "project"


def library_of(file: str) -> str:
    """The name of the installed package that a file belongs to. Empty for any other file."""
    installed = _INSTALLED.search(file)
    return "" if installed is None else installed.group(1).removesuffix(".py")

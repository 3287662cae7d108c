"""The names under which things are kept: the entry of a test, the file of a device."""

from __future__ import annotations

import re
from typing import TypeAlias

from pytest_cudagraph.files import short_name
from pytest_cudagraph.values import DeviceInfo

Key: TypeAlias = tuple[str, int]
"""The name of a test (see :func:`normal_name`) and a batch size."""

_SLUG_LENGTH = 80
"""File systems allow 255 bytes; temporary and lock files add to the name, and people read it."""

_LEGAL_MARKS = re.compile(r"\((?:r|tm|c)\)", re.IGNORECASE)


def normal_name(nodeid: str, name: str | None = None) -> str:
    """The name of a test in a baseline: the explicit ``name``, or the nodeid as pytest itself would say it.

    pytest-xdist up to 3.8 appends ``@group`` to nodeids under ``--dist loadgroup``; a baseline must not depend on that.
    """
    if name is not None:
        return name
    path, separator, test = nodeid.partition("::")
    return path + separator + _without_group(test)


def _without_group(test: str) -> str:
    # A Python name holds no "@", a parameter id in its brackets may: only an "@" outside of them starts a group.
    function, bracket, rest = test.partition("[")
    if "@" in function or not bracket:
        return function.partition("@")[0]
    parameters, closing, tail = rest.rpartition("]")
    return function + bracket + parameters + closing + tail.partition("@")[0]


def parametrized(name: str, parameters: str) -> str:
    """``test_a[8-replay]``, ``test_a[fp16-8-replay]``: as pytest names parametrised tests, for grouping by function."""
    return f"{name[:-1]}-{parameters}]" if name.endswith("]") else f"{name}[{parameters}]"


def last_part(fullname: str) -> str:
    """``test_a[8-replay]`` of ``tests/test_a.py::test_a[8-replay]``."""
    path, bracket, parameters = fullname.partition("[")
    return path.rpartition("::")[2] + bracket + parameters


def slug(device: DeviceInfo) -> str:
    """The file name of a device model, without its suffix: ``nvidia-h200``, ``cpu-amd-epyc-9b45``."""
    plain = _LEGAL_MARKS.sub(" ", device.name).lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
    prefix = "cpu-" if device.kind == "cpu" and words.split("-")[0] != "cpu" else ""
    return short_name(prefix + words, _SLUG_LENGTH)

"""Write what only torch's table of operators knows, as a C++ header: who checks devices, and who writes into ``out``.

The table comes with torch, in ``torchgen``. Its rule for a generated CUDA function is this: without
``device_check: NoCheck`` every positional tensor and every ``out`` must be on one device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ENTRY = re.compile(r"^- func: (?P<name>[\w.]+)\(", re.MULTILINE)
_NO_CHECK = re.compile(r"^  device_check: NoCheck", re.MULTILINE)
_STRUCTURED = re.compile(r"^  structured(_delegate)?: ", re.MULTILINE)
_DELEGATE = re.compile(r"^  structured_delegate: (?P<name>[\w.]+)", re.MULTILINE)
_OUT = re.compile(r"\*, .*Tensor\(\w!\)")
_REDUCED_IN_OUT = frozenset({"mse_loss", "smooth_l1_loss"})
"""Their CPU kernels resize ``out`` for the numbers that they reduce, and memory of the device is not resized."""
_HEADER = """\
#pragma once

namespace emulator {

struct TableRow {
  const char* name;
  const char* wrapper;
  const char* out;
};

inline constexpr TableRow OPERATOR_TABLE[] = {
%s
};

}  // namespace emulator
"""


def header(site_packages: Path) -> str:
    """The header ``operator_table.h``: name, checking function (or empty), variant with ``out`` (or empty)."""
    table = site_packages / "torchgen" / "packaged" / "ATen" / "native" / "native_functions.yaml"
    rows = [f'    {{"aten::{name}", "{wrapper}", "{out}"}},' for name, wrapper, out in _rows(table.read_text("utf-8"))]
    return _HEADER % "\n".join(rows)


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    starts = [*_ENTRY.finditer(text)]
    ends = [entry.start() for entry in starts[1:]] + [len(text)]
    for entry, end in zip(starts, ends, strict=True):
        name, body = entry["name"], text[entry.start() : end]
        delegate = _DELEGATE.search(body)
        is_checked = _NO_CHECK.search(body) is None
        wrapper = _wrapper(name, bool(_STRUCTURED.search(body)), body) if is_checked else ""
        base = name.partition(".")[0]
        has_out = not base.endswith("_") and base not in _REDUCED_IN_OUT
        out = f"aten::{delegate['name']}" if delegate and has_out else ""
        yield name, wrapper, out


def _wrapper(name: str, is_structured: bool, body: str) -> str:
    """The name of torch's generated function, as it is shown in the error."""
    base, _, overload = name.partition(".")
    is_out = not base.endswith("_") and _OUT.search(body.partition("\n")[0])
    called = f"{base}_out" if is_out else base
    if is_structured:
        return f"wrapper_CUDA_{called}{'_' + overload if overload else ''}"
    return f"wrapper_CUDA_{overload}_{called}"

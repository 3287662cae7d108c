"""``pytest-cudagraph check``: a first answer about a model, before a test is written."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from pytest_cudagraph.cli.output import FINE, REGRESSION, USAGE, CommandOutput
from pytest_cudagraph.errors import CudagraphError
from pytest_cudagraph.foreign import message_of, value_text

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_INTEGERS = ("int64", "int32")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool")
_INPUT = re.compile(r"(?P<shape>[1-9]\d*(x[1-9]\d*)*)(:(?P<dtype>\w+))?(:(?P<values>[1-9]\d*))?")
_FORM = "1x64, 1x8:int64 or 1x8:int64:50257 (a shape, a dtype, for integers the number of values)"

# The user's own configuration and plugins belong to the user's own tests.
_ALONE = (
    *("-q", "--no-header", "--tb=short", "--noconftest", "--import-mode=importlib"),
    *("-p", "no:cacheprovider", "-p", "pytest_cudagraph.plugin"),
    *("--cudagraph", "--cudagraph-github=off", "--cudagraph-baseline=off"),
)
_FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def add_command(command: argparse.ArgumentParser) -> None:
    """``check MODULE:FACTORY [--inputs ...] [--batch-sizes ...] [--device ...] [--compile ...]``."""
    command.add_argument(
        "target", metavar="MODULE:FACTORY", help="a function without arguments that returns a model, or (model, inputs)"
    )
    command.add_argument("--inputs", metavar="SHAPE,SHAPE", help=f"example inputs: {_FORM}")
    command.add_argument("--batch-sizes", metavar="N,N", help="as --cudagraph-batch-sizes")
    command.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="as --cudagraph-device")
    command.add_argument(
        "--compile", choices=("none", "inductor", "aot"), default="none", help="as --cudagraph-compile"
    )
    command.set_defaults(run=check)


def check(arguments: argparse.Namespace) -> CommandOutput:
    """Run all stages on what the factory returns, and print the test that was run. Exit code 1 if it fails.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError` for a target that is no factory, and for inputs that are
    neither given nor returned.
    """
    shapes: str | None = arguments.inputs
    inputs = None if shapes is None else [_tensor(shape.strip()) for shape in shapes.split(",")]
    from pytest_cudagraph import environment

    environment.require_torch()
    target = _target(arguments.target)
    try:
        made = target.factory()
    except KeyboardInterrupt:
        raise
    # The user's code may raise anything, also SystemExit. Its own frames are the answer.
    except BaseException as error:
        shown = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return CommandOutput(lines=[*"".join(shown).splitlines(), f"{target.name} failed"], exit_code=REGRESSION)
    text = _test_of(target, made, inputs)
    outcome = _Outcome()
    with _returning(target, made):
        code = _run(f"test_{target.name.lower()}.py", text, arguments, outcome)
    lines = ["", "this test was run:", "", *text.splitlines()]
    if code == FINE and not outcome.has_passed:
        return CommandOutput(lines=[*lines, "", "it did not pass: nothing was tested"], exit_code=REGRESSION)
    return CommandOutput(lines=lines, exit_code=code if code in (FINE, REGRESSION) else USAGE)


class _Outcome:
    """Pytest ends with 0 also where a test was skipped."""

    has_passed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.has_passed |= report.when == "call" and report.passed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    module: ModuleType
    name: str
    factory: Callable[[], Any]

    @property
    def alias(self) -> str:
        """What the test calls the factory: its name, unless the test uses that name or pytest would collect it."""
        is_taken = self.name in ("cudagraph", "inputs", "model", "torch", "_") or self.name.lower().startswith("test")
        return "make_model" if is_taken else self.name


def _target(text: str) -> _Target:
    module, _, name = text.partition(":")
    if not module or not name.isidentifier():
        raise CudagraphError(f"check takes package.module:factory, such as models:make; found {value_text(text)}")
    # As python -m does.
    sys.path.insert(0, str(Path.cwd()))
    try:
        imported = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise CudagraphError(
            f"{module} cannot be imported: it calls sys.exit({value_text(error.code)})\n"
            '  to fix: call it only under if __name__ == "__main__":'
        ) from error
    # A module may raise anything while it is imported, also what pytest.skip raises.
    except BaseException as error:
        raise CudagraphError(
            f"{module} cannot be imported: {type(error).__name__}: {message_of(error)}\n"
            f"  modules are looked for in {Path.cwd()} and where this Python looks"
        ) from error
    factory = getattr(imported, name, None)
    if not callable(factory):
        near = difflib.get_close_matches(name, vars(imported), n=3)
        found = "nothing of that name" if factory is None else value_text(factory)
        nearest = f"; nearest: {', '.join(near)}" if near and factory is None else ""
        raise CudagraphError(f"{text} must name a function or a class without arguments; found {found}{nearest}")
    return _Target(module=imported, name=name, factory=factory)


def _tensor(text: str) -> str:
    """The code of one example input: ``1x8:int64:50257`` is ``torch.randint(50257, (1, 8))``."""
    found = _INPUT.fullmatch(text)
    dtype = (found and found["dtype"]) or "float32"
    if found is None or dtype not in _DTYPES or (found["values"] and dtype not in _INTEGERS):
        raise CudagraphError(f"--inputs takes {_FORM}; found {value_text(text)}\n  dtypes: {', '.join(_DTYPES)}")
    sizes = found["shape"].replace("x", ", ")
    of_dtype = f", dtype=torch.{dtype}" if dtype not in ("float32", "int64") else ""
    if dtype in _FLOATS:
        return f"torch.randn({sizes}{of_dtype})"
    shape = f"({sizes})" if "," in sizes else f"({sizes},)"
    made = "ones(" if dtype == "bool" else f"randint({found['values'] or 2}, "
    return f"torch.{made}{shape}{of_dtype})"


def _test_of(target: _Target, made: Any, inputs: list[str] | None) -> str:
    """The test, as it is run and printed."""
    returned, call = _call_of(target, made, inputs)
    imports = ["import torch"] if inputs else []
    alias = "" if target.alias == target.name else f" as {target.alias}"
    name = target.name.lower().removeprefix("test_")
    imports.append(f"from {target.module.__name__} import {target.name}{alias}")
    test = [f"def test_{name}(cudagraph):", f"    {returned} = {target.alias}()", f"    cudagraph({call})"]
    return "\n".join([*imports, "", "", *test, ""])


def _call_of(target: _Target, made: Any, inputs: list[str] | None) -> tuple[str, str]:
    """What the factory's result is assigned to, and the arguments of the call."""
    is_pair = isinstance(made, tuple) and len(made) == 2
    model = made[0] if is_pair else made
    if not callable(model):
        raise CudagraphError(f"{target.name} must return a model, or (model, inputs); found {value_text(made)}")
    if inputs is not None:
        return "model, _" if is_pair else "model", ", ".join(["model", *inputs])
    if not is_pair:
        raise CudagraphError(
            f"{target.name} returned a model without example inputs\n"
            "  to fix: give their shapes, as in --inputs=1x64, or return (model, inputs)"
        )
    if isinstance(made[1], dict):
        return "model, inputs", "model, kwargs=inputs"
    return "model, inputs", "model, *inputs" if isinstance(made[1], (tuple, list)) else "model, inputs"


@contextmanager
def _returning(target: _Target, made: Any) -> Iterator[None]:
    """Let the test's own call of the factory return what was made: a large model is loaded once."""
    # The factory may have removed its module.
    sys.modules[target.module.__name__] = target.module
    setattr(target.module, target.name, lambda: made)
    try:
        yield
    finally:
        setattr(target.module, target.name, target.factory)


def _run(file: str, text: str, arguments: argparse.Namespace, outcome: _Outcome) -> int:
    import pytest

    with tempfile.TemporaryDirectory(prefix="pytest-cudagraph-") as folder, mock.patch.dict(os.environ):
        for name in _FOREIGN:
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        place = Path(folder)
        (place / file).write_text(text, encoding="utf-8")
        (place / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        try:
            options = [f"--cudagraph-device={arguments.device}", f"--cudagraph-compile={arguments.compile}"]
            if arguments.batch_sizes is not None:
                options.append(f"--cudagraph-batch-sizes={arguments.batch_sizes}")
            command = [*_ALONE, *options, f"--rootdir={place}", str(place / file)]
            return int(pytest.main(command, plugins=[outcome]))
        except BrokenPipeError:  # the reader has stopped (| head)
            return 1

"""What the process of a mode gets, in a file: the engine, pickled, and where its code is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from pytest_cudagraph.decoding.modes.protocol import Engine, LoadRequest
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import message_of, value_text

_ENGINE, _MODULES = "engine.pickle", "modules.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRequest:
    """One mode of an engine, and what it generates."""

    engine: Engine
    load: LoadRequest
    arguments: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    count: int
    generations: int
    """Timed ones. One more before them is not timed."""


class _Pickler(pickle.Pickler):
    """Notes the file of each module whose functions and classes are pickled, because pickle only keeps its name."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into)
        self.files: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            file = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if file:
                self.files[obj.__module__] = str(Path(file).resolve())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, files: Mapping[str, str]) -> None:
        super().__init__(file)
        self._files = files

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        file = self._files.get(module_name)
        if file is not None and module_name not in sys.modules:
            _import_from(module_name, file)
        return super().find_class(module_name, global_name)


def _import_from(name: str, file: str) -> None:
    """Import a module from its file unless Python finds the same file itself: a test file is on no path."""
    if _found_file(name) == file:
        importlib.import_module(name)
        return
    loader = importlib.machinery.SourceFileLoader(name, file)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)


def _found_file(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else str(Path(spec.origin).resolve())


def write_request(request: ModeRequest, folder: Path) -> None:
    """Raises :class:`~pytest_cudagraph.errors.InputError` for an engine or an argument that cannot be pickled."""
    into = io.BytesIO()
    pickler = _Pickler(into)
    try:
        pickler.dump(request)
    # Pickle raises PicklingError, AttributeError or TypeError, and a user's __reduce__ anything.
    except Exception as error:
        raise InputError(
            f"each mode runs in a process of its own, so the engine and its arguments must be picklable; found "
            f"{value_text(request.engine)} with {value_text(request.arguments)}: {message_of(error)}\n"
            "  fix: a factory is a function at the top of a module, not a lambda or a function inside a test"
        ) from error
    (folder / _ENGINE).write_bytes(into.getvalue())
    (folder / _MODULES).write_text(json.dumps(pickler.files), encoding="utf-8")


def read_request(folder: Path) -> ModeRequest:
    """In the process of the mode. Raises what the import of the user's module raises."""
    files = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
    with (folder / _ENGINE).open("rb") as file:
        request = _Unpickler(file, files).load()
    assert isinstance(request, ModeRequest)
    return request

"""Resolves one call of a fixture; the only place that defines the precedence of its settings."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.foreign import value_text
from pytest_cudagraph.settings.marks import MARK_PARSERS, MarkSettings
from pytest_cudagraph.settings.options import DeviceOption, Settings
from pytest_cudagraph.settings.parsing import check_covered, min_speedups, name

if TYPE_CHECKING:
    from pytest_cudagraph.settings.registered import FeatureMark
    from pytest_cudagraph.values import CompileMode, MinSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All settings of one fixture call, resolved."""

    nodeid: str
    name: str
    batch_sizes: tuple[int, ...]
    min_speedup: Mapping[int, float]
    max_slowdown: float
    max_new_kernels: int | None
    min_over_compiled: float | None
    """The least speedup of the replay over the compiled code. None: shown and not judged."""
    accept: Mapping[str, str]
    """Hazards whose findings do not fail the test, each with the user's reason."""
    compile: CompileMode
    device: DeviceOption
    rtol: float | None
    atol: float | None
    time_budget: float
    min_source: MinSource
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a feature's mark or call sets beside these."""

    @property
    def seed(self) -> int:
        """Of random values and of the order of samples: the same in each run."""
        return zlib.crc32(self.name.encode(errors="surrogatepass"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """The keyword arguments of one fixture call, which override marker and settings; None: not given."""

    batch_sizes: Any = None
    compile: Any = None
    min_speedup: Any = None
    max_slowdown: Any = None
    rtol: Any = None
    atol: Any = None
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a feature, by the keys of its mark. None: not given."""
    mark: FeatureMark | None = None
    """The mark of the feature. None for a model."""
    has_rows: bool = True
    """False where the example runs as it is: ``batch_dim=None``, or a call without arguments."""
    compile_argument: str = "compile"
    """The fixture's own name for ``compile``."""

    def checked(self) -> CallSettings:
        """Parse every value; raises :class:`~pytest_cudagraph.errors.InputError`."""
        parsers = {**MARK_PARSERS, "min_speedup": min_speedups, "name": name}
        parsed = {}
        for key in (setting.name for setting in fields(self) if setting.name in parsers):
            shown = self.compile_argument if key == "compile" else key
            parsed[key] = _parse_argument(shown, parsers[key], getattr(self, key))
        options = self.mark.parsers if self.mark else {}
        checked = {key: _parse_argument(key, options[key], value) for key, value in self.options.items()}
        return replace(self, **parsed, options={key: value for key, value in checked.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of a fixture: the model, its example inputs and the settings of the call."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_dim: Any = 0
    draw: Any = None
    """Gives new inputs for audit and check: a function of a generator, or several examples."""
    reset: Any = None
    """What brings the state back in place before each measured call. None: its values are copied."""
    settings: CallSettings = field(default_factory=CallSettings)


def _parse_argument(key: str, parse: Callable[[Any], Any], value: Any) -> Any:
    if value is None:
        return None
    try:
        return parse(value)
    except ValueError as allowed:
        raise InputError(f"{key} takes {allowed}; found {value_text(value)}") from None


def make_case(nodeid: str, call: CallSettings, mark: MarkSettings, settings: Settings) -> Case:
    """Resolve one call: call argument, marker, command line, ini, default, in this order.

    Batch sizes that are not given come from a ``min={...}`` mapping, else from the setting. An example that runs as it
    is has batch size 1 then. Raises :class:`~pytest_cudagraph.errors.InputError` for a bad call argument.
    """
    call = call.checked()
    minimum = _first(call.min_speedup, mark.min, settings.min_speedup)
    from_mapping = tuple(minimum) if isinstance(minimum, Mapping) else None
    otherwise = settings.batch_sizes if call.has_rows else (1,)
    sizes = _first(call.batch_sizes, mark.batch_sizes, from_mapping, otherwise)
    if isinstance(minimum, Mapping):
        try:
            check_covered(minimum, sizes)
        except ValueError as mistake:
            raise InputError(str(mistake)) from None
    per_size = minimum if isinstance(minimum, Mapping) else dict.fromkeys(sizes, minimum)
    return Case(
        nodeid=nodeid,
        name=call.name or nodeid,
        batch_sizes=sizes,
        min_speedup={size: per_size.get(size, settings.min_speedup) for size in sizes},
        max_slowdown=_first(call.max_slowdown, mark.max_slowdown, settings.max_slowdown),
        max_new_kernels=mark.max_new_kernels,
        min_over_compiled=mark.min_over_compiled,
        accept=mark.accept or {},
        compile=_compile_mode(call, mark, settings),
        device=_first(mark.device, settings.device),
        rtol=_first(call.rtol, mark.rtol, None),
        atol=_first(call.atol, mark.atol, None),
        time_budget=_first(mark.time_budget, settings.time_budget),
        min_source=_min_source(call, mark, sizes),
        options={**mark.options, **call.options},
    )


def _compile_mode(call: CallSettings, mark: MarkSettings, settings: Settings) -> CompileMode:
    mode: CompileMode = _first(call.compile, mark.compile, settings.compile)
    if mark.min_over_compiled is not None and mode == "none":
        raise InputError(
            f"min_over_compiled={mark.min_over_compiled:g} needs compiled code to compare with; found compile='none'\n"
            "  to fix: compile='inductor' or 'aot', or leave min_over_compiled out"
        )
    return mode


def _min_source(call: CallSettings, mark: MarkSettings, sizes: Sequence[int]) -> MinSource:
    from pytest_cudagraph.values import MinSource  # every pytest run imports this module, and its values take 10 ms

    place: Literal["argument", "marker", "setting"] = "setting" if mark.min is None else "marker"
    if call.min_speedup is not None:
        place = "argument"
    minimum = _first(call.min_speedup, mark.min, 0.0)
    is_mapping = isinstance(minimum, Mapping)
    left_out = tuple(size for size in sizes if size not in minimum) if is_mapping else ()
    marker = f"{call.mark.name}(min_speedup" if call.mark else "graph_speedup(min"
    return MinSource(place=place, is_mapping=is_mapping, default_sizes=left_out, marker=marker)


def _first(*candidates: Any) -> Any:
    return next((value for value in candidates if value is not None), None)

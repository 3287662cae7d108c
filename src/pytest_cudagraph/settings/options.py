"""The table of options: each row defines a flag, its ini option and its line in the docs."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from pytest_cudagraph.settings.parsing import (
    DEVICES,
    device_of,
    distinct_sizes,
    fraction,
    number,
    one_of,
    seconds,
    thread_count,
)

if TYPE_CHECKING:
    from pytest_cudagraph.values import CompileMode

DeviceOption = str
"""``auto``, ``cuda``, ``cpu``, or the name that another plugin gave its backend."""
SAMPLE_FLAG = "--cudagraph-sample"
COMPILE_MODES = ("none", "inductor", "aot")
# Not read from the types: every pytest run loads this module, and ``values`` costs milliseconds.
Update = Literal["never", "new", "changed", "all"]


class Option(NamedTuple):
    """One row of the table: a command-line flag and its ini option, their parser, default and help."""

    flag: str
    help: str
    default: Any
    parse: Callable[[Any], Any] | None = None
    """None for an on/off flag."""
    metavar: str = ""
    bare: str | None = None
    """The value of a flag that is given without one; None where a value is required."""

    @property
    def ini(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def setting(self) -> str:
        return self.ini.removeprefix("cudagraph").removeprefix("_") or "enabled"


OPTIONS: tuple[Option, ...] = (
    Option(flag="--cudagraph", default=False, help="measure and gate; without it the models run once, eagerly"),
    Option(flag="--cudagraph-only", default=False, help="deselect tests that do not use the plugin"),
    Option(
        flag="--cudagraph-device",
        default="auto",
        parse=one_of(*DEVICES),
        metavar="auto|cuda|cpu",
        help="auto without a GPU uses the CPU twin: correctness is enforced, speed is not judged; "
        "cpu measures and gates on the CPU",
    ),
    Option(
        flag="--cudagraph-threads",
        default=1,
        parse=thread_count,
        metavar="N",
        help="torch's threads on the CPU twin; with more of them than idle cores, calls wait for each other",
    ),
    Option(flag="--cudagraph-require-gpu", default=False, help="stop with a usage error if there is no usable GPU"),
    Option(
        flag="--cudagraph-min-speedup",
        default=1.15,
        parse=number(above=0),
        metavar="X",
        help="minimum speedup of replay over eager, for tests whose marker sets none",
    ),
    Option(
        flag="--cudagraph-max-slowdown",
        default=0.10,
        parse=fraction(may_be_off=True),
        metavar="F",
        help="largest slowdown of the replay against the saved baseline (0.10 is 10 %; from 0 to 1, inf: no limit)",
    ),
    Option(
        flag="--cudagraph-batch-sizes", default=(1, 2, 4, 8), parse=distinct_sizes, metavar="N,N", help="batch sizes"
    ),
    Option(
        flag="--cudagraph-compile",
        default="none",
        parse=one_of(*COMPILE_MODES),
        metavar="none|inductor|aot",
        help="how the model is compiled before capture",
    ),
    Option(
        flag="--cudagraph-time-budget",
        default=10.0,
        parse=seconds,
        metavar="S",
        help="maximum seconds of measurement per batch size",
    ),
    Option(
        flag="--cudagraph-compile-timeout",
        default=600.0,
        parse=seconds,
        metavar="S",
        help="seconds to compile all batch sizes of a model; then the compile is stopped and the test fails",
    ),
    Option(
        flag="--cudagraph-baseline",
        default=".cudagraph",
        parse=str,
        metavar="DIR|URL",
        help="folder of the baseline files, relative to the root directory, or in an object store (s3://bucket/folder)",
    ),
    Option(
        flag="--cudagraph-update",
        default="never",
        parse=one_of("new", "changed", "all"),
        metavar="new|changed|all",
        bare="changed",
        help="save baselines of tests that passed; without a value: changed",
    ),
    Option(
        flag="--cudagraph-base",
        default=None,
        parse=str,
        metavar="REF",
        help="also measure the same tests at another revision of the repository (a git worktree, processes in turn), "
        "and fail tests whose replay is slower in the working tree",
    ),
    Option(
        flag="--cudagraph-base-slowdown",
        default=0.05,
        parse=fraction(may_be_off=True),
        metavar="F",
        help="largest slowdown of the replay against --cudagraph-base (0.05 is 5 %; from 0 to 1, inf: no limit)",
    ),
    Option(
        flag="--cudagraph-strict",
        default=False,
        help="inconclusive, not judged, not comparable, no baseline yet and stale also fail",
    ),
    Option(
        flag="--cudagraph-suggest",
        default=False,
        help="print a marker for each test that its measurement supports: the lower bounds minus the noise",
    ),
    Option(
        flag="--cudagraph-tune",
        default=False,
        help="after each call of cudagraph that passed, measure its batch sizes with and without a graph and compile, "
        "and print the marker of the best",
    ),
    Option(
        flag="--cudagraph-json", default=None, parse=str, metavar="PATH", help="write all results of this run as JSON"
    ),
    Option(
        flag="--cudagraph-html",
        default=None,
        parse=str,
        metavar="PATH",
        help="write all results of this run as one self-contained HTML page",
    ),
    Option(
        flag="--cudagraph-github",
        default="auto",
        parse=one_of("auto", "off"),
        metavar="auto|off",
        help="auto on GitHub Actions adds a step summary and annotates the lines of failing tests; off does neither",
    ),
)


# No slots: they create the class twice, and every pytest run would pay for that.
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of command line and ini; one object per session, in ``config.stash``."""

    enabled: bool
    only: bool
    device: DeviceOption
    require_gpu: bool
    min_speedup: float
    max_slowdown: float
    batch_sizes: tuple[int, ...]
    compile: CompileMode
    time_budget: float
    """Seconds."""
    compile_timeout: float
    """Seconds."""
    baseline: str
    update: Update
    strict: bool
    json: str | None
    html: str | None = None
    threads: int = 1
    """Of torch, on the CPU twin."""
    suggest: bool = False
    tune: bool = False
    github: Literal["auto", "off"] = "auto"
    base: str | None = None
    base_slowdown: float = 0.05
    sample: Path | None = None
    """The results folder of a process that ``--cudagraph-base`` started; None in any other process."""
    rootdir: Path = field(default_factory=Path)
    workers: int = 0
    """The number of xdist workers on this machine; 0 without xdist."""
    has_own_gpu: bool = False
    """Whether this process is an xdist worker and no other worker uses its GPU."""
    why_shared: str = ""
    """Why a GPU is not this process's alone: more xdist workers than GPUs, or another run. Empty where it is."""

    @property
    def baseline_folder(self) -> Path | str:
        """The folder of the baseline files; a URL or an absolute ``--cudagraph-baseline`` is used unchanged."""
        return self.baseline if "://" in self.baseline else self.rootdir / self.baseline


def add_options(parser: pytest.Parser) -> None:
    """Register every row of :data:`OPTIONS` as a flag and as an ini option."""
    group = parser.getgroup("cudagraph", "CUDA graph correctness and performance")
    for option in OPTIONS:
        # argparse formats "%"; the text of an ini option is not formatted.
        text = option.help.replace("%", "%%")
        if option.parse is None:
            group.addoption(option.flag, action="store_const", const=True, default=None, help=text)
            parser.addini(option.ini, option.help, type="bool", default=None)
            continue
        value: dict[str, Any] = {"nargs": "?", "const": option.bare} if option.bare else {}
        group.addoption(option.flag, default=None, metavar=option.metavar, help=text, **value)
        parser.addini(option.ini, option.help, type="string", default=None)
    # Internal, so not in the table: --cudagraph-base passes it to the processes that it starts.
    group.addoption(SAMPLE_FLAG, default=None, metavar="DIR", help=SUPPRESS)


def keep_paths(args: list[str]) -> bool:
    """Give a flag that stands without its optional value the bare one, so that argparse leaves a path after it alone.

    ``--cudagraph-update tests/`` becomes ``--cudagraph-update=changed tests/``. Returns whether something was changed.
    """
    changed = False
    for option in (each for each in OPTIONS if each.bare and each.parse):
        for at, (flag, following) in enumerate(pairwise(args)):
            if flag == option.flag and not following.startswith("-") and not _is_value(option, following):
                args[at], changed = f"{flag}={option.bare}", True
    return changed


def _is_value(option: Option, text: str) -> bool:
    try:
        return option.parse is not None and option.parse(text) is not None
    except ValueError:
        return False


def read_settings(config: pytest.Config, *, workers: int = 0) -> Settings:
    """Settings from command line and ini; a bad value is a :class:`pytest.UsageError` naming flag and value."""
    values = {option.setting: _read_option(config, option) for option in OPTIONS}
    settings = Settings(rootdir=config.rootpath, workers=workers, **values)
    sample = config.getoption(SAMPLE_FLAG)
    return settings if sample is None else _of_sample(settings, Path(sample))


def _of_sample(settings: Settings, folder: Path) -> Settings:
    """The settings of a process that only measures: no verdict on speed, no baseline, no further process."""
    quiet = replace(settings, html=None, github="off", base=None, update="never", strict=False, tune=False)
    return replace(quiet, sample=folder, json=str(folder / "run.json"))


def _read_option(config: pytest.Config, option: Option) -> Any:
    given, where = config.getoption(option.flag), option.flag
    if isinstance(given, str) and not given.strip():
        raise pytest.UsageError(
            f"{where} takes {option.metavar}; found {given!r}, perhaps from an unset shell variable; set the variable, "
            f"or omit the flag to use the default ({default_text(option.default)})"
        )
    if given is None:
        given, where = config.getini(option.ini), f"ini option {option.ini}"
    # Older versions of pytest return "" or [] for an ini option that is not set.
    if given is None or given == "" or given == []:
        return option.default
    if option.parse is None:
        return bool(given)
    try:
        return (device_of(config) if option.setting == "device" else option.parse)(given)
    except ValueError as allowed:
        raise pytest.UsageError(f"{where} takes {allowed}; found {given!r}") from None


def default_text(default: Any) -> str:
    if default is False or default is None:
        return "off"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)

"""What pytest is told of this plugin: options, marks and the names of its fixtures. Every run loads this module.

Each row of the table of options defines a flag, its ini option and its line in the docs.
"""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from pytest_cudagraph.settings.parsing import (
    DEVICES,
    distinct_sizes,
    fraction,
    name,
    number,
    one_of,
    path_name,
    seconds,
    thread_count,
)

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE_FLAG = "--cudagraph-sample"
COMPILE_MODES = ("none", "inductor", "aot")


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

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)


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
        help="maximum seconds of measurement per batch size, 0.5 where speed is not judged",
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
        parse=path_name,
        metavar="DIR|URL",
        help="folder of the baseline files, from the root directory, in an object store (s3://bucket/folder), or off",
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
        parse=name,
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
        flag="--cudagraph-json",
        default=None,
        parse=path_name,
        metavar="PATH",
        help="write all results of this run as JSON",
    ),
    Option(
        flag="--cudagraph-html",
        default=None,
        parse=path_name,
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


def add_options(parser: pytest.Parser) -> None:
    """Register every row of :data:`OPTIONS` as a flag and as an ini option."""
    group = parser.getgroup("cudagraph", "CUDA graph correctness and performance")
    for option in OPTIONS:
        # argparse formats "%"; the text of an ini option is not formatted.
        text = option.help.replace("%", "%%")
        if option.parse is None:
            group.addoption(option.flag, action="store_const", const=True, default=None, help=text)
        else:
            value: dict[str, Any] = {"nargs": "?", "const": option.bare} if option.bare else {}
            group.addoption(option.flag, default=None, metavar=option.metavar, help=text, **value)
        # pytest 8.1 has no type for a number, and no version has one for a list of them: this plugin parses each value.
        kind: Literal["linelist", "string"] = "linelist" if option.is_list else "string"
        parser.addini(option.ini, option.help, type=kind, default=None)
    # Internal, so not in the table: --cudagraph-base passes it to the processes that it starts.
    group.addoption(SAMPLE_FLAG, default=None, metavar="DIR", help=SUPPRESS)


def is_any_set(config: pytest.Config) -> bool:
    """Whether the command line or the ini file sets an option of the table."""
    flags = any(config.getoption(flag) is not None for flag in (SAMPLE_FLAG, *(option.flag for option in OPTIONS)))
    return flags or any(ini_value(config, option) is not None for option in OPTIONS)


def ini_value(config: pytest.Config, option: Option) -> Any:
    """What the configuration file or ``-o`` sets: a text, or the value of a TOML file. None where nothing is set."""
    try:
        value = config.getini(option.ini)
    except (TypeError, pytest.UsageError):
        # In pytest 9 the tables of TOML are typed, and a number or a boolean is refused as a text. Nothing else is.
        return _toml_value(config.inipath, option.ini)
    if option.is_list and value and all(isinstance(part, str) for part in value):
        return ",".join(value)
    # Older versions of pytest return "" or [] for an ini option that is not set.
    return None if value in ("", []) else value


def _toml_value(path: Path | None, key: str) -> Any:
    """The value in the table ``[pytest]`` or ``[tool.pytest]`` of a file that pytest has read."""
    import tomllib

    document = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    tables = document.get("pytest", {}), document.get("tool", {}).get("pytest", {})
    return next(table[key] for table in tables if key in table)


MARK = "graph_speedup"
FIXTURES = frozenset(
    {"cudagraph", "compile_model", "capture_graphs", "assert_replay_close", "measure_speedup", "perf_monitor", "tune"}
)

WORKLOAD_MARK = "workload"
WORKLOAD_FIXTURES = frozenset({"cudagraph", "measure_speedup", "decode_engine"})
"""Those whose results can be ranked."""

MARK_HELPS = (
    f"{MARK}(min=1.15 | {{batch: min}}, *, max_slowdown, max_new_kernels, min_over_compiled, accept, batch_sizes, "
    "compile, device, rtol, atol, time_budget): gate the CUDA graph of the model that the test hands to the cudagraph "
    "fixtures",
    f"{WORKLOAD_MARK}(*, group, name): rank this test among those of its group by the measured latencies; by default "
    "the group is the test function and the name is the id of its parameters",
)


class FeatureMark(NamedTuple):
    """The mark of a feature: its text in ``pytest --markers``, its arguments, and the fixtures of the feature."""

    name: str
    help: str
    fixtures: frozenset[str]
    """A test with one of them uses this plugin. The mark needs a test with one of them."""
    parsers: Mapping[str, Callable[[Any], Any]]
    """Of the arguments that are the feature's. Each raises ``ValueError`` with a text of what is allowed."""
    settings: tuple[str, ...] = ()
    """The other arguments: ``min_speedup``, and those of ``graph_speedup``."""


def added_marks(config: pytest.Config) -> tuple[FeatureMark, ...]:
    """The marks that features and other plugins add. Raises :class:`pytest.UsageError` if a hook raises."""
    try:
        return tuple(mark for marks in config.hook.pytest_cudagraph_marks(config=config) for mark in marks)
    except BaseException as error:
        from pytest_cudagraph.settings.other_plugins import RAISED, hook_text

        if not isinstance(error, RAISED):
            raise
        raise pytest.UsageError(hook_text("pytest_cudagraph_marks", error)) from error


# A class of its own would cost every pytest run a third of a millisecond.
_NAMES: pytest.StashKey[tuple[tuple[FeatureMark, ...], frozenset[str], frozenset[str]]] = pytest.StashKey()


def _names(config: pytest.Config) -> tuple[tuple[FeatureMark, ...], frozenset[str], frozenset[str]]:
    """The marks of features, and the names of all fixtures and of all marks. They are known after the collection."""
    if _NAMES not in config.stash:
        features = added_marks(config)
        fixtures = FIXTURES.union(*(mark.fixtures for mark in features))
        config.stash[_NAMES] = features, fixtures, frozenset({MARK, WORKLOAD_MARK, *(mark.name for mark in features)})
    return config.stash[_NAMES]


def feature_marks(config: pytest.Config) -> tuple[FeatureMark, ...]:
    """The marks that features and other plugins add. All of them are known after the collection."""
    return _names(config)[0]


def uses_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or of a feature."""
    _, fixtures, _ = _names(item.config)
    return not fixtures.isdisjoint(getattr(item, "fixturenames", ()))


def concerns_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or has one of its marks. Every pytest run asks it for each test."""
    _, _, marks = _names(item.config)
    return uses_plugin(item) or any(mark.name in marks for mark in item.iter_markers())

"""The settings of a run, read from the command line and the ini file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_cudagraph.settings.other_plugins import device_of
from pytest_cudagraph.settings.parsing import switch
from pytest_cudagraph.settings.registered import OPTIONS, SAMPLE_FLAG, Option, ini_value

if TYPE_CHECKING:
    from pytest_cudagraph.values import CompileMode

DeviceOption = str
"""``auto``, ``cuda``, ``cpu``, or the name that another plugin gave its backend."""
Update = Literal["never", "new", "changed", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def uses_baseline(self) -> bool:
        """False with ``--cudagraph-baseline=off``: nothing is read, compared or saved."""
        return self.baseline != "off"


def read_settings(config: pytest.Config, *, workers: int = 0) -> Settings:
    """Settings from command line and ini; a bad value is a :class:`pytest.UsageError` naming flag and value."""
    values = {option.setting: _read_option(config, option) for option in OPTIONS}
    settings = Settings(rootdir=config.rootpath, workers=workers, **values)
    if settings.update != "never" and not settings.uses_baseline:
        raise pytest.UsageError("--cudagraph-update saves a baseline, and --cudagraph-baseline=off uses none")
    if settings.json and settings.html:
        from pytest_cudagraph import files  # not in every pytest run

        if files.is_same_path(settings.json, settings.html):
            found = f"found {settings.json!r} for both"
            raise pytest.UsageError(f"--cudagraph-json and --cudagraph-html are two files; {found}")
    _refuse_baseline_folder(config, settings)
    sample = config.getoption(SAMPLE_FLAG)
    return settings if sample is None else _of_sample(settings, Path(sample))


def _refuse_baseline_folder(config: pytest.Config, settings: Settings) -> None:
    """A document beside the baselines could replace one of them, and would be read as one."""
    folder = settings.baseline_folder
    for flag, path in (("json", settings.json), ("html", settings.html)):
        if path and isinstance(folder, Path) and (config.invocation_params.dir / path).parent == folder:
            raise pytest.UsageError(
                f"--cudagraph-{flag} takes a path outside of the folder of the baselines; found {path!r}"
            )


def _of_sample(settings: Settings, folder: Path) -> Settings:
    """The settings of a process that only measures: no verdict on speed, no baseline, no further process."""
    quiet = replace(settings, html=None, github="off", base=None, update="never", strict=False, tune=False)
    return replace(quiet, sample=folder, json=str(folder / "run.json"))


def _read_option(config: pytest.Config, option: Option) -> Any:
    value, place = config.getoption(option.flag), option.flag
    if isinstance(value, str) and not value.strip():
        raise pytest.UsageError(
            f"{place} takes {option.metavar}; found {value!r}, perhaps from an unset shell variable; set the variable, "
            f"or omit the flag to use the default ({default_text(option.default)})"
        )
    # argparse takes a path after such a flag for its value.
    remedy = f"; where it is a path: {place}={option.bare} {value}" if option.bare and value is not None else ""
    if value is None:
        value, place = ini_value(config, option), f"ini option {option.ini}"
        remedy = "" if isinstance(value, str) else f"; write for example: {_toml_line(option)}"
    if value is None:
        return option.default
    try:
        return (device_of(config) if option.setting == "device" else option.parse or switch)(value)
    except ValueError as allowed:
        raise pytest.UsageError(f"{place} takes {allowed}; found {value!r}{remedy}") from None


def _toml_line(option: Option) -> str:
    """A line that a TOML file may hold: the default where there is one."""
    # The default of an update is no value that can be set.
    example = option.bare or (option.metavar if option.default is None else option.default)
    return f"{option.ini} = {json.dumps(example)}"


def default_text(default: Any) -> str:
    if default is False or default is None:
        return "off"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)

"""Every flag has an ini twin, made by one table; a bad value is a usage error that names flag, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_cudagraph import device
from pytest_cudagraph.settings.options import default_text, read_settings
from pytest_cudagraph.settings.parsing import DEVICES
from pytest_cudagraph.settings.registered import COMPILE_MODES, OPTIONS
from pytest_cudagraph.values import CompileMode

GIVEN = {
    "--cudagraph-device": ("cpu", "cpu"),
    "--cudagraph-min-speedup": ("1.3", 1.3),
    "--cudagraph-max-slowdown": ("0", 0.0),
    "--cudagraph-batch-sizes": ("3, 1", (3, 1)),
    "--cudagraph-compile": ("aot", "aot"),
    "--cudagraph-time-budget": ("2.5", 2.5),
    "--cudagraph-compile-timeout": ("30", 30.0),
    "--cudagraph-baseline": ("elsewhere", "elsewhere"),
    "--cudagraph-update": ("new", "new"),
    "--cudagraph-base": ("HEAD~1", "HEAD~1"),
    "--cudagraph-base-slowdown": ("0.02", 0.02),
    "--cudagraph-json": ("out.json", "out.json"),
    "--cudagraph-html": ("out.html", "out.html"),
    "--cudagraph-threads": ("2", 2),
    "--cudagraph-github": ("off", "off"),
}
SWITCHES = [option.flag for option in OPTIONS if option.parse is None]

BAD = {
    "--cudagraph-device": "gpu",
    "--cudagraph-min-speedup": "0",
    "--cudagraph-max-slowdown": "-0.1",
    "--cudagraph-batch-sizes": "1,0",
    "--cudagraph-compile": "jit",
    "--cudagraph-time-budget": "nan",
    "--cudagraph-compile-timeout": "soon",
    "--cudagraph-update": "tests/",
    "--cudagraph-base-slowdown": "5",
    "--cudagraph-threads": "0",
    "--cudagraph-github": "on",
}
FRACTIONS = ("--cudagraph-max-slowdown", "--cudagraph-base-slowdown")


@pytest.fixture
def settings_of(pytester):
    """Settings of a pytest configured with these arguments and this ini file."""

    def read(*arguments, ini=""):
        pytester.makeini(f"[pytest]\n{ini}")
        return read_settings(pytester.parseconfig(*arguments))

    return read


def test_the_cases_below_cover_every_option():
    assert {*GIVEN, *SWITCHES} == {option.flag for option in OPTIONS}


def test_defaults_hold_when_nothing_is_said(settings_of):
    settings = settings_of()
    for option in OPTIONS:
        assert getattr(settings, option.setting) == option.default


@pytest.mark.parametrize("flag", GIVEN)
def test_a_flag_sets_its_setting(settings_of, flag):
    text, expected = GIVEN[flag]
    option = next(option for option in OPTIONS if option.flag == flag)
    assert getattr(settings_of(f"{flag}={text}"), option.setting) == expected


@pytest.mark.parametrize("flag", GIVEN)
def test_the_ini_twin_sets_the_same(settings_of, flag):
    text, expected = GIVEN[flag]
    option = next(option for option in OPTIONS if option.flag == flag)
    assert getattr(settings_of(ini=f"{option.ini} = {text}"), option.setting) == expected


@pytest.mark.parametrize("flag", SWITCHES)
def test_a_switch_is_set_by_flag_and_by_ini(settings_of, flag):
    option = next(option for option in OPTIONS if option.flag == flag)
    assert getattr(settings_of(flag), option.setting) is True
    assert getattr(settings_of(ini=f"{option.ini} = true"), option.setting) is True
    assert getattr(settings_of(ini=f"{option.ini} = false"), option.setting) is False


def test_the_command_line_wins_over_the_ini(settings_of):
    assert settings_of("--cudagraph-min-speedup=1.2", ini="cudagraph_min_speedup = 2").min_speedup == 1.2


def test_update_without_a_value_means_changed(settings_of):
    assert settings_of("--cudagraph-update").update == "changed"


def test_an_update_without_a_baseline_is_refused(settings_of):
    assert not settings_of("--cudagraph-baseline=off").uses_baseline
    with pytest.raises(pytest.UsageError, match="and --cudagraph-baseline=off uses none"):
        settings_of("--cudagraph-baseline=off", "--cudagraph-update")


@pytest.mark.parametrize("flag", BAD)
def test_a_bad_value_names_flag_and_value_and_what_is_allowed(settings_of, flag):
    with pytest.raises(pytest.UsageError) as error:
        settings_of(f"{flag}={BAD[flag]}")
    assert str(error.value).startswith(f"{flag} takes ")
    assert f"found {BAD[flag]!r}" in str(error.value)


@pytest.mark.parametrize("flag", FRACTIONS)
@pytest.mark.parametrize(("found", "percent"), [("10", "10 % is 0.1"), ("5", "5 % is 0.05"), ("-1", "10 % is 0.1")])
def test_a_fraction_that_must_have_been_meant_as_percent_is_refused(settings_of, flag, found, percent):
    with pytest.raises(pytest.UsageError) as error:
        settings_of(f"{flag}={found}")
    told = f"{flag} takes a fraction from 0 to 1 ({percent}), or inf for no limit; found {found!r}"
    assert str(error.value) == told


@pytest.mark.parametrize("flag", ["--cudagraph-time-budget", "--cudagraph-compile-timeout"])
def test_what_no_run_waits_for_is_no_number_of_seconds(settings_of, flag):
    assert settings_of(f"{flag}=86400")
    with pytest.raises(pytest.UsageError) as error:
        settings_of(f"{flag}=1e300")
    assert str(error.value) == f"{flag} takes a number above 0, at most 86400; found '1e300'"


@pytest.mark.parametrize("flag", FRACTIONS)
@pytest.mark.parametrize("allowed", ["1", "inf"])
def test_a_gate_may_allow_twice_the_time_or_in_so_many_words_anything(settings_of, flag, allowed):
    option = next(option for option in OPTIONS if option.flag == flag)
    assert getattr(settings_of(f"{flag}={allowed}"), option.setting) == float(allowed)


@pytest.mark.parametrize("flag", GIVEN)
@pytest.mark.parametrize("nothing", ["", " "])
def test_a_flag_with_an_empty_value_is_no_silent_default(settings_of, flag, nothing):
    with pytest.raises(pytest.UsageError, match=f"^{flag} takes .*; found {nothing!r}, .* omit the flag to use"):
        settings_of(f"{flag}={nothing}")


@pytest.mark.parametrize(("flag", "metavar", "default"), [("base", "REF", "off"), ("max-slowdown", "F", "0.1")])
def test_an_empty_value_is_refused_with_the_default_and_the_remedy(settings_of, flag, metavar, default):
    with pytest.raises(pytest.UsageError) as error:
        settings_of(f"--cudagraph-{flag}=")
    assert str(error.value) == (
        f"--cudagraph-{flag} takes {metavar}; found '', perhaps from an unset shell variable; "
        f"set the variable, or omit the flag to use the default ({default})"
    )


def test_a_bad_ini_value_names_the_ini_option(settings_of):
    with pytest.raises(
        pytest.UsageError, match=r"^ini option cudagraph_min_speedup takes a number above 0; found 'x'$"
    ):
        settings_of(ini="cudagraph_min_speedup = x")


def test_a_path_after_update_is_refused_with_a_line_that_works(pytester):
    pytester.mkpydir("tests")
    config = pytester.parseconfig("--cudagraph-update", "tests")
    with pytest.raises(pytest.UsageError) as error:
        read_settings(config)
    told, remedy = str(error.value).split("; where it is a path: ")
    assert told == "--cudagraph-update takes one of new, changed, all; found 'tests'"
    config = pytester.parseconfig(*remedy.split())
    assert (read_settings(config).update, config.args) == ("changed", ["tests"])


def test_the_baseline_folder_lies_under_the_root_unless_absolute(settings_of, tmp_path, pytester):
    assert settings_of().baseline_folder == pytester.path / ".cudagraph"
    assert settings_of(f"--cudagraph-baseline={tmp_path}").baseline_folder == tmp_path


def test_spelt_out_choices_are_those_of_the_types():
    assert get_args(CompileMode) == COMPILE_MODES
    assert get_args(device.DeviceOption) == DEVICES


def options_markdown():
    """The table of ``docs/options.md``."""
    rows = ["| flag | ini | default | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        value = f"={option.metavar}" if option.metavar else ""
        shown = f"[{value}]" if option.bare else value
        # An unescaped bar would end the cell.
        flag = f"{option.flag}{shown}".replace("|", "\\|")
        rows.append(f"| `{flag}` | `{option.ini}` | {default_text(option.default)} | {option.help} |")
    return "\n".join(rows) + "\n"


def test_the_options_page_shows_the_table():
    page = Path(__file__).parents[3] / "docs" / "options.md"
    assert options_markdown() in page.read_text(encoding="utf-8")


def test_a_process_of_a_comparison_writes_nothing_on_github(settings_of):
    assert settings_of("--cudagraph-sample=DIR").github == "off"


def test_the_home_folder_of_a_path_is_found_without_a_shell(settings_of, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    settings = settings_of(
        "--cudagraph-baseline=~/base", "--cudagraph-json=~/run.json", "--cudagraph-html=~nobody-here/x"
    )
    assert str(settings.baseline_folder) == "/home/ann/base"
    assert (settings.json, settings.html) == ("/home/ann/run.json", "~nobody-here/x")


def test_document_and_page_are_two_files_also_through_a_link(pytester):
    (pytester.path / "page").symlink_to("run")
    result = pytester.runpytest("--cudagraph", "--cudagraph-json=run", "--cudagraph-html=page")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*are two files; found 'run' for both"])


def test_document_and_page_are_two_files(pytester):
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest("--cudagraph", "--cudagraph-json=run", "--cudagraph-html=./run")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cudagraph-json and --cudagraph-html are two files; found 'run' for both"])

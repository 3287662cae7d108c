"""Every option can be set in every kind of file that pytest reads, in the form that is natural there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_cudagraph.settings.options import read_settings
from pytest_cudagraph.settings.registered import OPTIONS, is_any_set

pytestmark = pytest.mark.contract

SET = {
    "cudagraph": True,
    "cudagraph_only": True,
    "cudagraph_device": "cpu",
    "cudagraph_threads": 2,
    "cudagraph_require_gpu": False,
    "cudagraph_min_speedup": 1.3,
    "cudagraph_max_slowdown": 0.25,
    "cudagraph_batch_sizes": [3, 1],
    "cudagraph_compile": "aot",
    "cudagraph_time_budget": 3,
    "cudagraph_compile_timeout": 30.5,
    "cudagraph_baseline": "elsewhere",
    "cudagraph_update": "new",
    "cudagraph_base": "HEAD~1",
    "cudagraph_base_slowdown": 0.02,
    "cudagraph_strict": True,
    "cudagraph_suggest": True,
    "cudagraph_tune": True,
    "cudagraph_json": "out.json",
    "cudagraph_html": "out.html",
    "cudagraph_github": "off",
}
"""A value of each option that is not its default, except the switch that stops a run without a GPU."""
EXPECTED = {key: tuple(value) if isinstance(value, list) else value for key, value in SET.items()}

WRONG = {
    **{option.ini: 1 for option in OPTIONS if option.parse is None},
    "cudagraph_device": True,
    "cudagraph_threads": 2.5,
    "cudagraph_min_speedup": True,
    "cudagraph_max_slowdown": [0.1],
    "cudagraph_batch_sizes": 4,
    "cudagraph_compile": False,
    "cudagraph_time_budget": [10],
    "cudagraph_compile_timeout": True,
    "cudagraph_baseline": False,
    "cudagraph_update": True,
    "cudagraph_base": 1,
    "cudagraph_base_slowdown": True,
    "cudagraph_json": True,
    "cudagraph_html": 1,
    "cudagraph_github": False,
}
"""A value of a type that the option does not take."""


def ini_text(value):
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# JSON's form of a boolean, a number, a text and a list of numbers is TOML's too.
INI_FILES = {"pytest.ini": "[pytest]", "tox.ini": "[pytest]", "setup.cfg": "[tool:pytest]"}
FILES = {
    **{name: (name, head, ini_text) for name, head in INI_FILES.items()},
    "ini_options": ("pyproject.toml", "[tool.pytest.ini_options]", json.dumps),
    "pytest.toml": ("pytest.toml", "[pytest]", json.dumps),
    "tool.pytest": ("pyproject.toml", "[tool.pytest]", json.dumps),
}
TYPED = pytest.mark.skipif(pytest.version_tuple < (9,), reason="typed tables came with pytest 9")
KINDS = [pytest.param(kind, marks=TYPED) if kind in ("pytest.toml", "tool.pytest") else kind for kind in FILES]


@pytest.fixture
def config_of(pytester):
    """The configuration of a pytest that reads these lines from a file of this kind."""

    def read(kind, lines, *arguments):
        name, head, _ = FILES[kind]
        pytester.path.joinpath(name).write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
        config = pytester.parseconfig(*arguments)
        assert config.inipath == pytester.path / name
        return config

    return read


def lines_of(kind, values):
    return [f"{key} = {FILES[kind][2](value)}" for key, value in values.items()]


def test_the_values_cover_every_option():
    assert set(SET) == set(WRONG) == {option.ini for option in OPTIONS}
    same = {option.ini for option in OPTIONS if EXPECTED[option.ini] == option.default}
    assert same == {"cudagraph_require_gpu"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_a_file_sets_every_option(config_of, kind):
    settings = read_settings(config_of(kind, lines_of(kind, SET)))
    assert {option.ini: getattr(settings, option.setting) for option in OPTIONS} == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", SET)
def test_one_option_of_a_file_sets_the_plugin_to_work(config_of, kind, key):
    assert is_any_set(config_of(kind, lines_of(kind, {key: SET[key]})))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_an_option_sets_nothing(config_of, kind):
    assert not is_any_set(config_of(kind, lines_of(kind, {"xfail_strict": True})))


@pytest.mark.parametrize("kind", KINDS)
def test_an_override_comes_before_the_file(config_of, kind):
    overrides = ["-ocudagraph=false", "-ocudagraph_min_speedup=2", "-ocudagraph_batch_sizes=5,7"]
    settings = read_settings(config_of(kind, lines_of(kind, SET), *overrides))
    assert (settings.enabled, settings.min_speedup, settings.batch_sizes) == (False, 2.0, (5, 7))


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_that_is_neither_true_nor_false_is_one_clear_error(config_of, kind):
    config = config_of(kind, lines_of(kind, {"cudagraph": "maybe"}))
    with pytest.raises(pytest.UsageError) as error:
        read_settings(config)
    assert str(error.value) == "ini option cudagraph takes true or false; found 'maybe'"


@TYPED
@pytest.mark.parametrize("kind", ["pytest.toml", "tool.pytest"])
@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_type_is_one_clear_error_with_a_line_that_works(config_of, kind, key):
    config = config_of(kind, lines_of(kind, {key: WRONG[key]}))
    with pytest.raises(pytest.UsageError) as error:
        read_settings(config)
    told, remedy = str(error.value).split("; write for example: ")
    assert told.startswith(f"ini option {key} takes ")
    assert told.endswith(f"; found {WRONG[key]!r}")
    option = next(option for option in OPTIONS if option.ini == key)
    is_default = option.bare is None and option.default is not None
    value = getattr(read_settings(config_of(kind, [remedy])), option.setting)
    assert value == (option.default if is_default else option.bare or option.metavar)


@TYPED
def test_a_wrong_type_ends_the_run_before_any_test(pytester):
    pytester.path.joinpath("pytest.toml").write_text("[pytest]\ncudagraph_min_speedup = true\n", encoding="utf-8")
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.lines == [
        "ERROR: ini option cudagraph_min_speedup takes a number above 0; found True; "
        "write for example: cudagraph_min_speedup = 1.15",
        "",
    ]


@pytest.mark.parametrize("kind", KINDS[3:])
def test_the_lines_of_the_options_page_work_in_every_toml_file(config_of, kind):
    page = Path(__file__).parents[2].joinpath("docs", "options.md").read_text(encoding="utf-8")
    head, *lines = page.split("```toml\n")[1].split("```")[0].splitlines()
    settings = read_settings(config_of(kind, lines))
    assert head == "[tool.pytest]"
    shown = (settings.strict, settings.min_speedup, settings.batch_sizes, settings.compile)
    assert shown == (True, 1.15, (1, 8), "inductor")


@TYPED
def test_a_typed_file_of_another_name_is_read_too(pytester):
    pytester.path.joinpath("ci.toml").write_text("[tool.pytest]\ncudagraph_batch_sizes = [3]\n", encoding="utf-8")
    assert read_settings(pytester.parseconfig("-c", "ci.toml")).batch_sizes == (3,)

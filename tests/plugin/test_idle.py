"""A run that does not use the plugin loads next to nothing of it; the first use loads the rest."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.contract

LOADED = """
import sys

def pytest_unconfigure(config):
    for name in sorted(sys.modules):
        if name.startswith("pytest_cudagraph"):
            print("loaded", name)
"""
LIGHT = [
    "pytest_cudagraph",
    "pytest_cudagraph.decoding",
    "pytest_cudagraph.decoding.mark",
    "pytest_cudagraph.decoding.plugin",
    "pytest_cudagraph.hook_specs",
    "pytest_cudagraph.own_graphs",
    "pytest_cudagraph.own_graphs.plugin",
    "pytest_cudagraph.plugin",
    "pytest_cudagraph.serving",
    "pytest_cudagraph.serving.plugin",
    "pytest_cudagraph.settings",
    "pytest_cudagraph.settings.parsing",
    "pytest_cudagraph.settings.registered",
]
"""What every pytest run imports. Each module costs it up to half a millisecond."""


@pytest.fixture
def loaded(project):
    """The modules of this package that a run in a process of its own imports."""

    def run(*arguments, **files):
        project.pytester.makeconftest(LOADED)
        project.pytester.makepyfile(**files)
        result = project.run_alone("-s", *arguments)
        assert result.ret == 0, result.stdout.str()
        return [line.removeprefix("loaded ") for line in result.outlines if line.startswith("loaded ")]

    return run


def test_an_idle_run_loads_small_modules(loaded):
    assert loaded(test_plain="import pytest\n\n@pytest.mark.skipif(False, reason='')\ndef test_plain(): pass") == LIGHT


@pytest.mark.parametrize("argument", ["--cudagraph", "--cudagraph-batch-sizes=1", "-ocudagraph_max_slowdown=0.2"])
def test_an_option_of_the_command_line_or_the_ini_file_loads_the_rest(loaded, argument):
    assert "pytest_cudagraph.session.hooks" in loaded(argument, test_plain="def test_plain(): pass")


@pytest.mark.parametrize(
    "body",
    [
        "def test_it(perf_monitor): pass",
        "def test_it(request): request.getfixturevalue('perf_monitor')",
        "import pytest\n\n@pytest.mark.workload\ndef test_it(cudagraph): pass",
    ],
    ids=["fixture", "fixture at run time", "mark"],
)
def test_a_test_that_uses_the_plugin_loads_the_rest(loaded, body):
    assert "pytest_cudagraph.session.run_end" in loaded(test_it=body)


def test_a_mark_is_checked_without_any_option(project):
    project.pytester.makepyfile("import pytest\n\n@pytest.mark.graph_speedup(min=0)\ndef test_it(cudagraph): pass")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*graph_speedup: min takes a number above 0*found 0"])


def test_workers_of_a_run_without_options_use_the_fixtures(project):
    pytest.importorskip("xdist")
    project.pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass
        def test_monitor(perf_monitor): pass
        def test_model(cudagraph): cudagraph(lambda: 1)
        """
    )
    project.run_alone("-n2").assert_outcomes(passed=3)


def test_a_mistaken_mark_reaches_the_controller_of_a_strict_run(project):
    pytest.importorskip("xdist")
    project.pytester.makepyfile("import pytest\n\n@pytest.mark.graph_speedup(min=0)\ndef test_it(cudagraph): pass")
    result = project.run_alone("-n1", "--cudagraph-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "graph_speedup: min takes a number above 0" in result.stderr.str()


def test_the_plugin_can_be_loaded_by_its_module(project, monkeypatch):
    project.pytester.makepyfile("def test_it(cudagraph): pass")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    project.run_alone("-p", "pytest_cudagraph.plugin", "--cudagraph-only").assert_outcomes(passed=1)
    project.run_alone().assert_outcomes(errors=1)

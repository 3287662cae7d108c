"""The figures of the source are counted right, and the source keeps their limits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "house_figures.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("house_figures", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["house_figures"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["house_figures"]


@pytest.fixture
def house(script, tmp_path, monkeypatch):
    """The figures of a source with these files. A module's name becomes its path in the package."""

    def figures(tests="", **modules):
        folder = tmp_path / "src" / "pytest_cudagraph"
        for name, text in {"__init__": "__all__ = ['A', 'B']\n", **modules}.items():
            path = folder / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "test_it.py").write_text(tests)
        monkeypatch.setattr(script, "ROOT", tmp_path)
        return script.figures_of(tmp_path)

    return figures


def test_the_source_keeps_every_limit(script):
    assert script.main() == 0


def test_every_figure_has_a_limit(script, house):
    assert house().keys() == script.LIMITS.keys()


def test_lines_and_modules_of_features_are_not_of_the_core(house):
    figures = house(gate="a = 1\nb = 2\n", serving__in__rows="c = 3\n", tests="a\nb\nc\n")
    assert (figures["lines of src"], figures["modules of src"]) == (4, 3)
    assert (figures["lines of the core"], figures["modules of the core"]) == (3, 2)
    assert figures["lines of tests"] == 3


@pytest.mark.parametrize(
    "back",
    [
        "from pytest_cudagraph.a import A",
        "from pytest_cudagraph import a",
        "import pytest_cudagraph.a",
        "def late():\n    from pytest_cudagraph import a",
        "if TYPE_CHECKING:\n    from pytest_cudagraph.a import A",
    ],
)
def test_a_circle_is_counted_also_for_types_and_in_functions(house, back):
    figures = house(a="from pytest_cudagraph.b import B", b="from pytest_cudagraph.c import C", c=back)
    assert figures["circles of imports"] == ["pytest_cudagraph.a <-> pytest_cudagraph.b <-> pytest_cudagraph.c"]


def test_imports_that_go_down_are_no_circle(house):
    assert (
        house(a="from pytest_cudagraph import b", b="import json", c="import pytest_cudagraph.a")["circles of imports"]
        == []
    )


def test_names_of_classes_are_counted_over_modules(house):
    figures = house(a="class A: ...\nclass B: ...", b="class B: ...")
    assert figures["class names twice"] == ["B"]
    assert figures["public names"] == ["A", "B"]


def test_long_functions_and_files_are_named(script, house):
    long = "def f():\n" + "    pass\n" * 40
    figures = house(a=long + "x = 1\n" * 260, b="def g():\n" + "    pass\n" * 39, tests="x = 1\n" * 501)
    assert figures["functions over 40 lines"] == ["41 pytest_cudagraph.a:1 f"]
    assert figures["modules over 300 lines"] == ["301 pytest_cudagraph.a"]
    assert figures["modules below 60 lines"] == ["40 pytest_cudagraph.b"]
    assert figures["test files over 500 lines"] == ["501 tests.test_it"]


def test_a_figure_above_its_limit_fails_and_is_named(script, house, monkeypatch, capsys):
    house(a="class A: ...", b="class A: ...")
    assert script.main() == 1
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "ABOVE" in line] == [
        "class names twice"
    ]
    monkeypatch.setitem(script.LIMITS, "class names twice", 1)
    assert script.main() == 0

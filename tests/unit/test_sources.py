"""The line to which a finding points."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph import sources
from pytest_cudagraph.sources import syntax
from pytest_cudagraph.sources.syntax import assigned_at, gpu_branches, names_host
from pytest_cudagraph.values import Site

MODEL = """\
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return self.scaled(
            x,
        )

    def scaled(self, x):
        if x.sum().item() > 0:
            raise ValueError("positive")
        return x


class Wrapping(torch.nn.Module):
    def forward(self, x):
        try:
            return Net()(x)
        except ValueError as error:
            raise RuntimeError("wrapped") from error
"""


# Compiled with a name that is no file, so it counts as machinery. The lines of this file count as the user's.
WATCH = """
class SiteWatch(TorchDispatchMode):
    sites = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sites.append(sources.user_site())
        return func(*args, **(kwargs or {}))
"""


@pytest.fixture
def user_module(tmp_path):
    path = tmp_path / "model_of_user.py"
    path.write_text(MODEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sites_of(model, x):
    scope = {"TorchDispatchMode": TorchDispatchMode, "sources": sources}
    exec(compile(WATCH, "<string>", "exec"), scope)
    watch = scope["SiteWatch"]()
    with torch.inference_mode(), watch:
        model(x)
    return watch.sites


def test_the_site_of_an_operation_is_the_users_innermost_line(user_module):
    assert set(sites_of(user_module.Net(), -torch.ones(2))) == {
        Site(file=user_module.__file__, line=11, function="scaled")
    }


def test_lines_of_torch_modules_are_skipped_up_to_the_line_that_calls_them():
    found = sites_of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
    assert {(site.file, site.function) for site in found} == {(__file__, "sites_of")}


def test_an_exceptions_site_is_where_the_users_code_raised(user_module):
    with pytest.raises(ValueError) as caught:
        user_module.Net()(torch.ones(2))
    assert sources.user_site_of(caught.value) == Site(file=user_module.__file__, line=12, function="scaled")


def test_an_exception_raised_from_another_is_followed_to_its_cause(user_module):
    with pytest.raises(RuntimeError) as caught:
        user_module.Wrapping()(torch.ones(2))
    assert sources.user_site_of(caught.value).line == 12


def test_an_exception_that_was_never_raised_has_no_site():
    assert sources.user_site_of(ValueError("never raised")) is None


def test_causes_that_run_in_a_circle_end():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert sources.user_site_of(first) is None


ORIGINS = {
    "machinery": [
        torch.__file__,
        torch.nn.functional.__file__,
        sources.user_lines.__file__,
        importlib.util.__file__,
        "/env/lib/python3.11/site-packages/_pytest/python.py",
        "/env/lib/python3.11/site-packages/pluggy/_callers.py",
        "<string>",
        "<eval_with_key>.7",
        "<frozen importlib._bootstrap>",
    ],
    "library": [
        "/env/lib/python3.11/site-packages/transformers/masking_utils.py",
        "/usr/lib/python3/dist-packages/timm/layers/norm.py",
    ],
    "project": [__file__, "C:\\models\\net.py", "<stdin>", "<ipython-input-1-abc>"],
}


@pytest.mark.parametrize(("origin", "name"), [(origin, name) for origin in ORIGINS for name in ORIGINS[origin]])
def test_a_file_is_the_machinerys_a_librarys_or_the_projects(origin, name):
    assert sources.origin_of(name) == origin


def test_a_description_quotes_the_line_and_shortens_the_path(user_module, tmp_path, monkeypatch):
    site = Site(file=user_module.__file__, line=11, function="scaled")
    monkeypatch.chdir(tmp_path)
    assert sources.describe(site) == "model_of_user.py:11 in scaled: if x.sum().item() > 0:"


def test_a_description_without_function_or_source_is_the_place_alone():
    assert sources.describe(Site(file="/gone.py", line=3)) == "/gone.py:3"


LIBRARY = "import torch\n\ndef twice(call):\n    return call()\n"


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "site-packages" / "models_of_others.py"
    path.parent.mkdir()
    path.write_text(LIBRARY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sites_below(call):
    """``user_sites``, called from code that counts as machinery."""
    scope = {"sources": sources}
    exec(compile("def ask(): return sources.user_sites()", "<string>", "exec"), scope)
    return call(scope["ask"])


def test_a_line_of_the_project_needs_no_second_one():
    found = sites_below(lambda ask: ask())
    assert (found.site.file, found.called_from) == (__file__, None)


def test_a_line_of_a_library_comes_with_the_line_of_the_project_that_led_there(library):
    found = sites_below(library.twice)
    assert (found.site.file, found.site.line, found.site.function) == (library.__file__, 4, "twice")
    assert (found.called_from.file, found.called_from.function) == (__file__, "sites_below")


def ones(device=None, *args, asked="ones"):
    """A factory that returns whether the calling line names the host."""
    return names_host(sys._getframe(1), asked)


DEVICE, NAME = torch.device("cpu"), "cpu"

HOST = {
    "a word": lambda: ones(device="cpu"),
    "a word with an index": lambda: ones(device="cpu:0"),
    "a device": lambda: ones(device=torch.device("cpu")),
    "beside another": lambda: (ones(device=DEVICE), ones(device="cpu"))[1],
    "several lines": lambda: (
        ones(
            None,
            device="cpu",
        )
        if DEVICE is None
        else ones(
            device="cpu",
        )
    ),
}

NOT_CERTAIN = {
    "a variable": lambda: ones(device=DEVICE) or "cpu" == DEVICE,
    "a name in a variable": lambda: ones(device=NAME) or "cpu" != NAME,
    "what there is": lambda: ones(device="cuda" if torch.cuda.is_available() else "cpu"),
    "a GPU": lambda: ones(device="cuda"),
    "another function": lambda: ones(device="cpu", asked="zeros"),
    "another argument": lambda: ones(None, "cpu"),
}


@pytest.mark.parametrize("name", HOST)
def test_a_device_that_is_written_out_as_the_host_is_the_host(name):
    assert HOST[name]()


@pytest.mark.parametrize("name", NOT_CERTAIN)
def test_any_other_device_may_be_the_models_own(name):
    assert not NOT_CERTAIN[name]()


def test_a_file_that_is_no_python_names_nothing(tmp_path):
    path = tmp_path / "cell.py"
    path.write_text("%magic\n", encoding="utf-8")
    scope = {"ones": ones}
    exec(compile("found = ones(device='cpu')", str(path), "exec"), scope)
    assert scope["found"] is False


BRANCHES = """\
def forward(x):
    if x.device.type == "cuda":
        return 1
    y = 2 if "cuda" == x.device.type else 3
    return y if x.kind == "cuda" or x.device.type != "cuda" else 4


def other(x):
    return x
"""


def test_branches_on_the_type_of_a_device_are_found_in_the_function_of_a_line(tmp_path):
    path = tmp_path / "branches.py"
    path.write_text(BRANCHES, encoding="utf-8")
    assert gpu_branches(Site(file=str(path), line=5)) == (2, 4)
    assert gpu_branches(Site(file=str(path), line=9)) == ()
    assert gpu_branches(Site(file=str(tmp_path / "gone.py"), line=1)) == ()


def test_each_file_of_a_large_model_is_parsed_once(tmp_path, monkeypatch):
    sites = [Site(file=str(tmp_path / f"part{number}.py"), line=2) for number in range(70)]
    for site in sites:
        Path(site.file).write_text('def f(x):\n    if x.device.type == "cuda": return x\n', encoding="utf-8")
    parsed, parse = [], syntax.tree_of
    monkeypatch.setattr(syntax, "tree_of", lambda file: parsed.append(file) or parse(file))
    assert [gpu_branches(site) for _ in range(3) for site in sites] == [(2,)] * 210
    assert len(parsed) == 70


class Assigns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.made, self.kept, self.table = 1, None, {}

    def forward(self, x):
        self.kept, other = x, 1
        self.table["x"] = other
        self.steps: int = other
        self.total += 1
        return x


class Inherits(Assigns):
    pass


@pytest.mark.parametrize(("attribute", "line"), [("kept", 7), ("table", 8), ("steps", 9), ("total", 10)])
def test_the_line_that_assigns_an_attribute_is_found(attribute, line):
    first = inspect.getsourcelines(Assigns)[1]
    site = assigned_at(Inherits, attribute)
    assert (site.file, site.line, site.function) == (__file__, first + line - 1, "forward")


@pytest.mark.parametrize(
    ("kind", "attribute"), [(Assigns, "made"), (Assigns, "x"), (torch.nn.Linear, "weight"), (int, "real")]
)
def test_what_only_construction_or_a_library_assigns_has_no_line(kind, attribute):
    assert assigned_at(kind, attribute) is None

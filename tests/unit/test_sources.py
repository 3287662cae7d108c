"""Which line a finding points at."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph import sources
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


# Compiled under a name that stands for no file, as nobody's code: this file's own lines are "the user's".
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


@pytest.mark.parametrize(
    "name",
    [
        torch.__file__,
        torch.nn.functional.__file__,
        sources.__file__,
        importlib.util.__file__,
        "/env/lib/python3.11/site-packages/_pytest/python.py",
        "/env/lib/python3.11/site-packages/pluggy/_callers.py",
        "<string>",
        "<eval_with_key>.7",
        "<frozen importlib._bootstrap>",
    ],
)
def test_the_machinery_is_nobodys_model(name):
    assert not sources._is_user_file(name)


@pytest.mark.parametrize(
    "name",
    [
        __file__,
        "/env/lib/python3.11/site-packages/transformers/masking_utils.py",
        "/usr/lib/python3/dist-packages/timm/layers/norm.py",
        "C:\\models\\net.py",
        "<stdin>",
        "<ipython-input-1-abc>",
    ],
)
def test_models_tests_and_installed_model_libraries_are_the_users(name):
    assert sources._is_user_file(name)


def test_a_description_quotes_the_line_and_shortens_the_path(user_module, tmp_path, monkeypatch):
    site = Site(file=user_module.__file__, line=11, function="scaled")
    monkeypatch.chdir(tmp_path)
    assert sources.describe(site) == "model_of_user.py:11 in scaled: if x.sum().item() > 0:"


def test_a_description_without_function_or_source_is_the_place_alone():
    assert sources.describe(Site(file="/gone.py", line=3)) == "/gone.py:3"

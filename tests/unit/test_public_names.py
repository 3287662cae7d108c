"""What the package exports: sorted, complete, loaded late."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pytest_cudagraph
from pytest_cudagraph import errors


def test_all_is_sorted_and_every_name_is_there():
    assert pytest_cudagraph.__all__ == sorted(pytest_cudagraph.__all__)
    for name in pytest_cudagraph.__all__:
        assert getattr(pytest_cudagraph, name).__name__ == name


def test_every_error_is_exported_under_its_public_name():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException | Warning)
    ]
    assert {each.__name__ for each in classes} <= set(pytest_cudagraph.__all__)
    assert {each.__module__ for each in classes} == {"pytest_cudagraph"}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'GraphRunnr'"):
        _ = pytest_cudagraph.GraphRunnr


@pytest.mark.parametrize("module", ["plugin", "summary"])
def test_loading_the_plugin_or_the_summary_loads_neither_torch_nor_nvml(module):
    heavy = "sorted({'torch', 'pynvml', 'numpy', 'psutil'} & set(sys.modules))"
    code = f"import sys, pytest_cudagraph.{module}; print({heavy})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

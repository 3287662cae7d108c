"""Names of entries and files stay the same wherever and however a test ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.facts import CPU, H200

from pytest_cudagraph.baseline import normal_name, slug


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/test_a.py::test_b", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b@gpu0", "tests/test_a.py::test_b"),
        ("tests/test_a.py::TestC::test_b@gpu0", "tests/test_a.py::TestC::test_b"),
        ("tests/test_a.py::test_b[0]@gpu0", "tests/test_a.py::test_b[0]"),
        ("tests/test_a.py::test_b[x@y]", "tests/test_a.py::test_b[x@y]"),
        ("tests/test_a.py::test_b[x@y]@gpu0", "tests/test_a.py::test_b[x@y]"),
        ("tests/test_a.py::test_b[a::b@c[0]]@gpu0", "tests/test_a.py::test_b[a::b@c[0]]"),
        ("tests/test_a.py::test_b@gpu[0]", "tests/test_a.py::test_b"),
        ("tests/@int[8]/test_a.py::test_b", "tests/@int[8]/test_a.py::test_b"),
    ],
)
def test_only_a_group_of_xdist_is_cut_from_a_nodeid(nodeid, name):
    assert normal_name(nodeid) == name


def test_an_explicit_name_is_kept_as_it_is():
    assert normal_name("tests/test_a.py::test_b", "decoder@v2") == "decoder@v2"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "nvidia-a100-sxm4-80gb-mig-1g-10gb"),
        ("../../etc/passwd", "etc-passwd"),
        ("显卡", "unknown"),
        ("X" * 300, f"{'x' * 67}-0d4e2ca9e9cb"),
    ],
)
def test_a_gpu_is_a_safe_file_name(name, expected):
    assert slug(replace(H200, name=name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AMD EPYC 9B45", "cpu-amd-epyc-9b45"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "cpu-intel-xeon-cpu-2-20ghz"),
        ("cpu", "cpu"),
        ("", "cpu-unknown"),
    ],
)
def test_a_cpu_is_called_one_in_its_file_name(name, expected):
    assert slug(replace(CPU, name=name)) == expected

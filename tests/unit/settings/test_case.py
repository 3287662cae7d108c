"""One call resolved: call argument, marker, settings; bad arguments are input errors."""

from __future__ import annotations

import pytest

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.settings.case import CallSettings, make_case
from pytest_cudagraph.settings.marks import MarkSettings
from pytest_cudagraph.settings.options import Settings
from pytest_cudagraph.settings.registered import OPTIONS
from pytest_cudagraph.values import MinSource

DEFAULTS = Settings(**{option.setting: option.default for option in OPTIONS})


def case_of(mark=None, settings=DEFAULTS, **call):
    return make_case("tests/test_a.py::test_a", CallSettings(**call), mark or MarkSettings(), settings)


def test_defaults_reach_the_case():
    case = case_of()
    assert case.batch_sizes == (1, 2, 4, 8)
    assert case.min_speedup == dict.fromkeys((1, 2, 4, 8), 1.15)
    assert (case.max_slowdown, case.max_new_kernels, case.compile, case.device) == (0.10, None, "none", "auto")
    assert (case.rtol, case.atol, case.time_budget, case.name) == (None, None, 10.0, "tests/test_a.py::test_a")


def test_the_marker_wins_over_settings_and_the_call_over_the_marker():
    mark = MarkSettings(min=1.5, compile="aot", batch_sizes=(2,), rtol=0.1, device="cpu", time_budget=1.0)
    case = case_of(mark, min_speedup=3, compile="inductor", name="mine")
    assert (case.min_speedup, case.compile, case.batch_sizes, case.rtol) == ({2: 3.0}, "inductor", (2,), 0.1)
    assert (case.device, case.time_budget, case.name) == ("cpu", 1.0, "mine")


def test_a_mapping_of_minimums_names_the_batch_sizes():
    case = case_of(MarkSettings(min={1: 2.0, 96: 1.0}))
    assert (case.batch_sizes, case.min_speedup) == ((1, 96), {1: 2.0, 96: 1.0})


def test_an_example_that_runs_as_it_is_has_batch_size_1_unless_call_or_marker_names_another():
    assert case_of(has_rows=False).batch_sizes == (1,)
    assert case_of(MarkSettings(min={6: 2.0}), has_rows=False).batch_sizes == (6,)
    assert case_of(has_rows=False, batch_sizes=[3]).batch_sizes == (3,)


@pytest.mark.parametrize(
    ("mark", "argument", "source"),
    [
        (None, None, MinSource()),
        (MarkSettings(min=1.5), None, MinSource(place="marker")),
        (MarkSettings(min={1: 1.5}), None, MinSource(place="marker", is_mapping=True)),
        (MarkSettings(min={1: 1.5}), 2.0, MinSource(place="argument")),
        (None, {1: 2.0}, MinSource(place="argument", is_mapping=True)),
    ],
)
def test_the_case_knows_who_asks_for_the_least_speedup(mark, argument, source):
    assert case_of(mark, min_speedup=argument).min_source == source


def test_a_batch_size_the_mapping_leaves_out_gets_the_setting():
    case = case_of(MarkSettings(min={1: 2.0}), batch_sizes=[1, 4])
    assert case.min_speedup == {1: 2.0, 4: 1.15}
    assert case.min_source.default_sizes == (4,)


def test_a_minimum_for_a_batch_size_that_is_not_measured_is_refused():
    with pytest.raises(InputError, match=r"min names batch size 96, which batch_sizes \(1,\) leaves out"):
        case_of(MarkSettings(min={96: 1.0}), batch_sizes=[1])


def test_a_gain_over_compiled_code_needs_a_compiler():
    mark = MarkSettings(min_over_compiled=1.05)
    assert case_of(mark, compile="aot").min_over_compiled == 1.05
    with pytest.raises(
        InputError, match=r"min_over_compiled=1.05 needs compiled code .*; found compile='none'\n  to fix"
    ):
        case_of(mark)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"batch_sizes": [0]}, "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found [0]"),
        ({"batch_sizes": [-2]}, "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found [-2]"),
        ({"compile": "jit"}, "compile takes one of none, inductor, aot; found 'jit'"),
        ({"min_speedup": -1}, "min_speedup takes a number above 0; found -1"),
        ({"compile": "max-autotune", "compile_argument": "mode"},
         "mode takes one of none, inductor, aot; found 'max-autotune'"),
        ({"max_slowdown": "x"},
         "max_slowdown takes a fraction from 0 to 1 (10 % is 0.1), or inf for no limit; found 'x'"),
        ({"rtol": -1}, "rtol takes a number of at least 0; found -1"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_what_is_allowed(call, text):
    with pytest.raises(InputError) as error:
        case_of(**call)
    assert str(error.value) == text

"""Marks are parsed at collection: each mistake names the node, the value and what is allowed."""

from __future__ import annotations

import re

import pytest

from pytest_cudagraph.settings.marks import MarkSettings, read_marks

MISTAKES = {
    "min=0": "min takes a number above 0; found 0",
    "min='fast'": "min takes a number above 0; found 'fast'",
    "min=True": "min takes a number above 0; found True",
    "min={0: 1.1}": "min takes a number above 0, or {batch size: number above 0}; found {0: 1.1}",
    "min={1: -1}": "min takes a number above 0, or {batch size: number above 0}; found {1: -1}",
    "min={}": "min takes a number above 0, or {batch size: number above 0}; found {}",
    "max_slowdown=-1": "max_slowdown takes a fraction from 0 to 1 (10 % is 0.1), or inf for no limit; found -1",
    "max_slowdown=5": "max_slowdown takes a fraction from 0 to 1 (5 % is 0.05), or inf for no limit; found 5",
    "accept='rng'": 'accept takes a reason per hazard, such as {"baked-scalar": "times zero"}; found \'rng\'',
    "accept={'rng': 1}": 'accept takes a reason per hazard, such as {"baked-scalar": "times zero"}; found {\'rng\': 1}',
    "min_over_compiled=0": "min_over_compiled takes a number above 0; found 0",
    "max_new_kernels=1.5": "max_new_kernels takes a whole number of at least 0; found 1.5",
    "batch_sizes=[]": "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found []",
    "batch_sizes=[1, 1]": "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found [1, 1]",
    "batch_sizes=4": "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found 4",
    "batch_sizes=[2.0]": "batch_sizes takes distinct whole numbers of at least 1, such as 1,2,4,8; found [2.0]",
    "compile='jit'": "compile takes one of none, inductor, aot; found 'jit'",
    "device='gpu'": "device takes one of auto, cuda, cpu; found 'gpu'",
    "rtol=-1e-3": "rtol takes a number of at least 0; found -0.001",
    "atol=None": "atol takes a number of at least 0; found None",
    "time_budget=0": "time_budget takes a number above 0, at most 86400; found 0",
    "time_budget=10**400": f"time_budget takes a number above 0, at most 86400; found 1{'0' * 97}...{'0' * 99}",
    "time_budget=1e300": "time_budget takes a number above 0, at most 86400; found 1e+300",
}


@pytest.fixture
def item_with(request):
    """A test item that uses the fixture and carries these marks, outermost first."""

    def make(*marks, fixture="cudagraph"):
        decorators = "".join(f"@pytest.mark.graph_speedup({mark})\n" for mark in marks)
        names = {"pytest": pytest}
        exec(f"{decorators}def test_func({fixture}): pass\n", names)
        return pytest.Function.from_parent(request.node.parent, name="test_func", callobj=names["test_func"])

    return make


LENGTHS = "distinct whole numbers of tokens of at least"
DECODE_MISTAKES = {
    "min_speedup=0": "min_speedup takes a number above 0; found 0",
    "prompt_lengths=[0]": f"prompt_lengths takes {LENGTHS} 1, such as [32, 512]; found [0]",
    "output_lengths=[1]": f"output_lengths takes {LENGTHS} 2, such as [32, 512]; found [1]",
    "output_lengths='8'": f"output_lengths takes {LENGTHS} 2, such as [32, 512]; found '8'",
    "exact=1": "exact takes True or False; found 1",
}


@pytest.mark.parametrize("mark", DECODE_MISTAKES)
def test_a_value_of_the_decode_mark_out_of_range_is_named_with_what_is_allowed(pytester, mark):
    item = pytester.getitem(f"import pytest\n@pytest.mark.decode({mark})\ndef test_func(decode_engine): pass\n")
    with pytest.raises(pytest.UsageError) as error:
        read_marks(item)
    assert str(error.value) == f"{item.nodeid}: @pytest.mark.decode: {DECODE_MISTAKES[mark]}"


@pytest.mark.parametrize(
    ("marks", "fixture", "message"),
    [
        (
            "@pytest.mark.decode(1.2)",
            "decode_engine",
            "takes no positional arguments; found 1.2; write min_speedup=1.2",
        ),
        ("@pytest.mark.decode(min=1.2)", "decode_engine", "does not take min; it takes: min_speedup, prompt_lengths"),
        (
            "@pytest.mark.decode()",
            "cudagraph",
            "uses one of these fixtures: decode_engine, engine_modes; found",
        ),
        (
            "@pytest.mark.graph_speedup()",
            "decode_engine",
            "needs a test that uses one of these fixtures: assert_replay",
        ),
        ("@pytest.mark.decode()\n@pytest.mark.graph_speedup()", "cudagraph", "@pytest.mark.decode, not both"),
        (
            "@pytest.mark.decode(min_speedup={1: 2.0}, batch_sizes=[4])",
            "decode_engine",
            "min names batch size 1, which batch_sizes",
        ),
    ],
)
def test_a_decode_mark_in_the_wrong_place_is_answered(pytester, marks, fixture, message):
    item = pytester.getitem(f"import pytest\n{marks}\ndef test_func({fixture}): pass\n")
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        read_marks(item)


def test_the_closest_decode_mark_wins_per_key(pytester):
    marks = "@pytest.mark.decode(min_speedup=1.3)\n@pytest.mark.decode(min_speedup=2.0, prompt_lengths=[8], exact=True)"
    item = pytester.getitem(f"import pytest\n{marks}\ndef test_func(decode_engine): pass\n")
    assert read_marks(item) == MarkSettings(min=2.0, options={"prompt_lengths": (8,), "exact": True})


@pytest.mark.parametrize("mark", MISTAKES)
def test_a_value_out_of_range_is_named_with_what_is_allowed(item_with, mark):
    item = item_with(mark)
    with pytest.raises(pytest.UsageError) as error:
        read_marks(item)
    text = MISTAKES[mark]
    separator = ": " if " takes " in text else " "
    assert str(error.value) == f"{item.nodeid}: @pytest.mark.graph_speedup{separator}{text}"


def test_an_unknown_name_is_answered_with_the_known_ones(item_with):
    with pytest.raises(
        pytest.UsageError, match="does not take min_speedup; it takes: min, max_slowdown, max_new_kernels"
    ):
        read_marks(item_with("min_speedup=1.15"))


def test_a_positional_argument_is_answered_with_the_keyword(item_with):
    with pytest.raises(pytest.UsageError, match=r"takes no positional arguments; found 1\.2; write min=1\.2"):
        read_marks(item_with("1.2"))


def test_a_marked_test_without_our_fixtures_is_refused(item_with):
    with pytest.raises(pytest.UsageError, match=r"needs a test that uses one of these fixtures: .*; found tmp_path"):
        read_marks(item_with("min=1.2", fixture="tmp_path"))


def test_a_minimum_for_a_batch_size_that_is_not_measured_is_refused(item_with):
    with pytest.raises(pytest.UsageError, match=r"min names batch size 96, which batch_sizes \(1, 8\) leaves out"):
        read_marks(item_with("min={1: 2.0, 96: 1.0}, batch_sizes=[1, 8]"))


def test_the_closest_mark_wins_for_each_key(item_with):
    marks = read_marks(item_with("min=1.5, rtol=0.1", "min={4: 1.2}"))
    assert (marks.min, marks.rtol) == ({4: 1.2}, 0.1)


def test_a_test_without_marks_says_nothing(item_with):
    assert read_marks(item_with()) == MarkSettings()

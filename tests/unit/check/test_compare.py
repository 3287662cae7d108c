"""Two tensors: the same bits, close, or different in these words."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from pytest_cudagraph.check.compare import Tolerance, compare, furthest, has_nan, rounding_limit, spread
from pytest_cudagraph.pytree import same_bits

NAN, INF = math.nan, math.inf
DEFAULT = Tolerance()


def close(one, other, tolerance=DEFAULT, noise=0.0):
    return compare(torch.as_tensor(one), torch.as_tensor(other), tolerance, noise) is None


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
    ],
    ids=str,
)  # fmt: skip
def test_the_default_tolerances_are_those_of_assert_close(dtype):
    from torch.testing._comparison import default_tolerances

    assert DEFAULT.of(dtype) == tuple(default_tolerances(dtype))


def test_one_given_tolerance_leaves_the_other_at_its_default():
    assert Tolerance(rtol=0.5).of(torch.float32) == (0.5, 1e-5)
    assert Tolerance(atol=0.5).of(torch.float32) == (1.3e-6, 0.5)
    assert Tolerance(rtol=0.5, atol=0.5).of(torch.int64) == (0.0, 0.0)


def test_bits_tell_what_equality_does_not():
    assert same_bits(torch.tensor([NAN]), torch.tensor([NAN]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.zeros(2, 3).t(), torch.zeros(3, 2))
    assert same_bits(torch.zeros(0), torch.zeros(0))
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.int8], ids=str
)
def test_every_dtype_can_be_compared(dtype):
    ones, zeros = torch.ones(2, 2).to(dtype), torch.zeros(2, 2).to(dtype)
    assert compare(ones, ones.clone(), DEFAULT) is None
    assert compare(ones, zeros, DEFAULT)[1][-1] == "differing elements: 4 of 4"
    assert not same_bits(ones, zeros)
    assert spread(ones, zeros) == 1.0


def test_lazily_conjugated_tensors_are_compared_by_value():
    value = torch.tensor([1 + 2j])
    assert same_bits(value.conj(), torch.tensor([1 - 2j]))
    assert not same_bits(value.conj(), value)


def test_sparse_tensors_are_compared_by_their_values():
    one = torch.eye(2).to_sparse()
    assert same_bits(one, one.clone())
    assert compare(one, one * 2, DEFAULT)[0].startswith("off by 1 at index (0, 0)")


def test_quantized_tensors_are_compared_without_ending_the_process():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch calls them deprecated
        one, other = (torch.quantize_per_tensor(torch.tensor([v]), 0.1, 0, torch.qint8) for v in (1.0, 2.0))
        assert same_bits(one, one.clone())
        assert compare(one, other, DEFAULT) is not None


def test_noise_of_eager_is_allowed_twice():
    assert close([1.0], [1.015], noise=0.01)
    assert not close([1.0], [1.025], noise=0.01)


def test_the_largest_difference_beyond_the_tolerance_is_named():
    eager, replay = torch.tensor([[1e6, 1.0], [2.0, 3.0]]), torch.tensor([[1e6 + 1, 1.5], [2.0, 3.25]])
    found = compare(eager, replay, DEFAULT)
    assert found == (
        "off by 0.5 at index (0, 1); 1.13e-05 is allowed (rtol 1.3e-06, atol 1e-05)",
        ("eager 1, replay 1.5 at index (0, 1)", "differing elements: 2 of 4"),
    )


@pytest.mark.parametrize(
    ("eager", "replay", "message"),
    [
        (1.0, NAN, "eager 1, replay nan"),
        ([INF], [-INF], "eager inf, replay -inf at index (0,)"),
        ([True], [False], "eager True, replay False at index (0,)"),
        ([2**62], [2**62 + 1], "off by 1 at index (0,); no difference is allowed"),
        ([3], [1], "off by 2 at index (0,); no difference is allowed"),
        ([1 + 1j], [2 + 1j], "off by 1 at index (0,); 1.18e-05 is allowed (rtol 1.3e-06, atol 1e-05)"),
    ],
    ids=str,
)
def test_each_kind_of_value_has_its_words(eager, replay, message):
    assert compare(torch.tensor(eager), torch.tensor(replay), DEFAULT)[0] == message


def test_another_layout_is_reported():
    found = compare(torch.eye(2), torch.eye(2).to_sparse(), DEFAULT)
    assert found[0] == "replay gives layout sparse_coo where eager gives layout strided"


def test_empty_tensors_agree():
    assert close(torch.zeros(0, 3), torch.zeros(0, 3))
    assert rounding_limit(torch.zeros(0), DEFAULT) == 0.0


def test_only_inexact_numbers_can_be_nan():
    assert has_nan(torch.tensor([1.0, NAN]))
    assert not has_nan(torch.tensor([1.0, INF]))
    assert not has_nan(torch.tensor([1]))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN], [1.0], INF),
        ([INF], [-INF], INF),
        ([1.0], [[1.0]], INF),
        ([2**62], [2**62 + 1], 1.0),
    ],
    ids=str,
)
def test_the_spread_is_the_largest_distance(one, other, expected):
    assert spread(torch.tensor(one), torch.tensor(other)) == expected


def test_rounding_may_explain_half_of_the_digits_of_the_largest_value():
    assert rounding_limit(torch.tensor([1.0, -100.0, NAN, INF]), DEFAULT) == pytest.approx(0.0345, rel=0.01)
    assert rounding_limit(torch.tensor([1, 100]), DEFAULT) == 0.0
    assert rounding_limit(torch.tensor([1.0]), Tolerance(rtol=0.1, atol=0.5)) == pytest.approx(0.6)


def test_two_values_are_given_as_text():
    assert furthest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == ("2", "2.5 at index (1,)")
    assert furthest(torch.zeros(1), torch.zeros(2)) == ("shape (1,)", "shape (2,)")

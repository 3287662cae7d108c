"""Numbers as a reader sees them: the unit keeps them short, and rounding never shows 1000.0."""

from __future__ import annotations

import pytest

from pytest_cudagraph import units


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.0 ns"),
        (999.94, "999.9 ns"),
        (999.96, "1.0 µs"),
        (112_100, "112.1 µs"),
        (999_960, "1.0 ms"),
        (1.5e6, "1.5 ms"),
        (999.96e6, "1.0 s"),
        (12.3e9, "12.3 s"),
    ],
)
def test_latency(nanoseconds, text):
    assert units.latency_text(nanoseconds) == text


@pytest.mark.parametrize(("nanoseconds", "text"), [(4e6, "4 ms"), (99e6, "99 ms"), (100e6, "0.1 s"), (61e9, "61.0 s")])
def test_seconds(nanoseconds, text):
    assert units.seconds_text(nanoseconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (41 * 1024**2, "41.0 MiB"),
     (3 * 1024**4, "3072.0 GiB")],
)  # fmt: skip
def test_bytes(count, text):
    assert units.bytes_text(count) == text


def test_ratios_and_percents():
    assert units.factor_text(1.066) == "1.07x"
    assert [units.percent_text(value) for value in (0.004, 0.0999, 0.1, -0.25)] == ["0.4 %", "10.0 %", "10 %", "-25 %"]
    near = [units.percent_text(value) for value in (0.989, 0.995, 0.99999, 1.0)]
    assert near == ["99 %", "99.5 %", "99.9 %", "100 %"]


def test_seconds_and_nanoseconds_are_inverse():
    assert units.to_ns(units.to_seconds(123.0)) == 123.0


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "kernel", "1 kernel"), (0, "kernel", "0 kernels"), (2, "batch", "2 batches"), (3, "process", "3 processes")],
)
def test_plurals(count, noun, text):
    assert units.plural(count, noun) == text


@pytest.mark.parametrize("value", ["1" + "x" * 100, [1.0], None])
def test_seconds_that_are_no_number_are_refused(value):
    with pytest.raises((TypeError, ValueError)):
        units.to_ns(value)


def test_the_first_names_and_how_many_more():
    assert units.first_of(["a", "b", "c"], 3) == "a, b, c"
    assert units.first_of(["a", "b", "c"], 2) == "a, b and 1 more"

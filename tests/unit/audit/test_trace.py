"""The comparison of two calls, on traces made by hand."""

from __future__ import annotations

import pytest

from pytest_cudagraph.audit.trace import OutsideMemory, Trace, TracedOperation, differences
from pytest_cudagraph.values import Site

LINE = Site(file="net.py", line=7)
OTHER_LINE = Site(file="net.py", line=9)


def operation(name="aten.mul.Tensor", *, scalars=(), shapes=((2, 4),), reads=(), site=LINE):
    return TracedOperation(
        name=name, scalars=scalars, shapes=shapes, reads=reads, writes=(), site=site, refused=None, draws=False
    )


def outside(origin, storage, name="cache"):
    return OutsideMemory(origin=origin, name=name, storage=storage)


def found(first, second):
    traces = Trace(operations=first), Trace(operations=second)
    return [(difference.id, difference.site, difference.evidence) for difference in differences(*traces)]


def test_equal_calls_have_no_difference():
    assert found([operation(scalars=(1, "nan"))] * 3, [operation(scalars=(1, "nan"))] * 3) == []


def test_another_operation_is_control_flow_where_it_was_first_and_ends_the_comparison():
    first = [operation(), operation("aten.relu.default"), operation(scalars=(1,))]
    second = [operation(), operation("aten.tanh.default", site=OTHER_LINE), operation(scalars=(2,))]
    evidence = "aten.relu.default, then aten.tanh.default (line 7, then line 9)"
    assert found(first, second) == [("control-flow", LINE, evidence)]


def test_operations_without_a_line_are_compared_too():
    assert found([operation(site=None)], [operation("aten.abs.default")]) == [
        ("control-flow", None, "aten.mul.Tensor, then aten.abs.default")
    ]


@pytest.mark.parametrize("longer_first", [True, False])
def test_a_surplus_operation_is_control_flow(longer_first):
    short, long = [operation()], [operation(), operation("aten.relu.default", site=OTHER_LINE)]
    first, second = (long, short) if longer_first else (short, long)
    counts = f"{len(first)} operation{'s' * (len(first) != 1)}, then {len(second)}"
    assert found(first, second) == [("control-flow", OTHER_LINE, f"{counts}: aten.relu.default runs in one call only")]


def test_each_other_number_is_a_baked_scalar():
    first = [operation(scalars=("0.5",)), operation(scalars=(3,), site=OTHER_LINE)]
    second = [operation(scalars=("0.25",)), operation(scalars=(4,), site=OTHER_LINE)]
    assert found(first, second) == [
        ("baked-scalar", LINE, "aten.mul.Tensor: 0.5, then 0.25"),
        ("baked-scalar", OTHER_LINE, "aten.mul.Tensor: 3, then 4"),
    ]


def test_another_number_of_plain_arguments_is_a_baked_scalar():
    assert found([operation(scalars=(1,))], [operation(scalars=(1, 2))]) == [
        ("baked-scalar", LINE, "aten.mul.Tensor: 1 plain argument, then 2")
    ]


def test_another_shape_is_found_once_without_its_consequences():
    first = [operation(shapes=((2, 4),)), operation(scalars=(2,))]
    second = [operation(shapes=((3, 4),)), operation(scalars=(3,))]
    assert found(first, second) == [("dynamic-shape", LINE, "aten.mul.Tensor gives (2, 4), then (3, 4)")]


def test_state_at_another_address_is_rebound_and_explains_a_larger_shape():
    first = [operation(reads=(outside("state", 1),))]
    second = [operation(reads=(outside("state", 2),), shapes=((9, 4),))]
    assert found(first, second) == [("rebinds-state", LINE, "aten.mul.Tensor reads cache at another address")]


def test_another_piece_of_the_state_that_was_there_all_along_is_control_flow():
    first = Trace(operations=[operation(reads=(outside("state", 1, "experts.0.weight"),))], known=frozenset({1, 2}))
    second = Trace(operations=[operation(reads=(outside("state", 2, "experts.1.weight"),))], known=frozenset({1, 2}))
    (found,) = differences(first, second)
    evidence = "aten.mul.Tensor reads experts.0.weight, then experts.1.weight"
    assert (found.id, found.site, found.evidence) == ("control-flow", LINE, evidence)


def test_state_that_trades_its_memory_with_other_state_is_rebound():
    first = Trace(operations=[operation(reads=(outside("state", 1, "front"),))], known=frozenset({1, 2}))
    second = Trace(operations=[operation(reads=(outside("state", 2, "front"),))], known=frozenset({1, 2}))
    assert [found.id for found in differences(first, second)] == ["rebinds-state"]


def test_an_unknown_tensor_at_another_address_is_foreign():
    first = [operation(reads=(outside("foreign", 1),))]
    second = [operation(reads=(outside("foreign", 2, "a tensor of (4,)"),))]
    assert found(first, second) == [
        ("foreign-tensor", LINE, "aten.mul.Tensor reads a tensor of (4,) at another address")
    ]


def test_inputs_may_lie_anywhere():
    assert found([operation(reads=(outside("input", 1),))], [operation(reads=(outside("input", 2),))]) == []

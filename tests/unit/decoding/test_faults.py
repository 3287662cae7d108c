"""Each fault in decoding is found by its own gate and by no other."""

from __future__ import annotations

import pytest
from tests.decoding_faults import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_gate_and_no_other(name):
    expected, found = FAULTS[name].missed, FAULTS[name].found("cpu")
    assert found.keys() == expected.keys(), found
    assert all(text in found[gate] for gate, text in expected.items()), found

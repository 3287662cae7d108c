"""A refused capture names the cause and leaves a process in which everything works."""

from __future__ import annotations

import pytest
from tests.gpu.after_a_refusal import KINDS
from tests.gpu.processes import last_line_of


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_refused_capture_the_process_works_as_before(kind):
    assert last_line_of("after_a_refusal.py", kind) == f"fine after: {kind}"


def test_refusals_one_after_the_other_do_not_add_up():
    kinds = [*KINDS, *KINDS]
    assert last_line_of("after_a_refusal.py", *kinds) == f"fine after: {' '.join(kinds)}"

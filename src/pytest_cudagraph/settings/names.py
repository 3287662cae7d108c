"""The names pytest must know in every run: the mark, the fixtures, and which tests use them."""

from __future__ import annotations

import pytest

MARK = "graph_speedup"
FIXTURES = frozenset(
    {"cudagraph", "compile_model", "capture_graphs", "assert_replay_close", "measure_speedup", "perf_monitor"}
)

MARK_HELP = (
    f"{MARK}(min=1.15 | {{batch: min}}, *, max_slowdown, max_new_kernels, batch_sizes, compile, device, rtol, atol, "
    "time_budget): gate the CUDA graph of the model that the test hands to the cudagraph fixtures"
)


def uses_plugin(item: pytest.Item) -> bool:
    """Whether a test asks for one of our fixtures."""
    return not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def concerns_plugin(item: pytest.Item) -> bool:
    """Whether a test uses the plugin, or is marked as if it did."""
    return uses_plugin(item) or item.get_closest_marker(MARK) is not None

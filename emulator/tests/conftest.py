"""Everything here runs on the emulated CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark before ``-m gpu`` is looked at."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)

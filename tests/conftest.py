"""What every test may use: pytester, and goldens for the texts a user reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden():
    """Compare a text with ``tests/golden/NAME``; ``GOLDEN=update pytest`` rewrites it, for review in the diff."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        found = text.rstrip() + "\n"
        if os.environ.get("GOLDEN") == "update":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert found == expected, f"{path.name} differs; GOLDEN=update rewrites it for review"

    return check

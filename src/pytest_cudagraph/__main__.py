"""``python -m pytest_cudagraph``."""

from __future__ import annotations

import sys

from pytest_cudagraph.cli import main

sys.exit(main())

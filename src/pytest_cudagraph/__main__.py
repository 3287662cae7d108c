"""``python -m pytest_cudagraph``."""

import sys

from pytest_cudagraph.cli import main

sys.exit(main())

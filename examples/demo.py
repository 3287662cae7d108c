"""Run the examples with everything switched on: on CUDA graphs where there is a GPU, on the CPU twin elsewhere.

Further arguments go to pytest. The exit status is pytest's.
"""

import sys
from pathlib import Path

import pytest
import torch


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = Path(__file__).parent
    options = ["--cudagraph", f"--cudagraph-device={device}", "--cudagraph-update=changed", "-p", "no:cacheprovider"]
    # The run ends with the name of this page.
    options.append("--cudagraph-html=cudagraph-demo.html")
    return pytest.main([str(here), "--rootdir", str(here.parent), *options, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

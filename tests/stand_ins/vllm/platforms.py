"""The device of this build, as ``vllm.platforms`` names it."""

import os
from types import SimpleNamespace

current_platform = SimpleNamespace(device_type=os.environ.get("STAND_IN_VLLM_DEVICE", "cuda"))

"""The mark ``decode``. Every pytest run imports this module."""

from __future__ import annotations

from pytest_cudagraph.settings.parsing import flag, lengths
from pytest_cudagraph.settings.registered import FeatureMark

DECODE = FeatureMark(
    name="decode",
    help="decode(*, min_speedup=1.15 | {batch: min}, prompt_lengths, output_lengths, batch_sizes, max_slowdown, "
    "exact, device, rtol, atol, time_budget): gate what the decode_engine fixture generates with captured steps",
    fixtures=frozenset({"decode_engine", "engine_modes"}),
    parsers={"prompt_lengths": lengths(least=1), "output_lengths": lengths(least=2), "exact": flag},
    settings=("min_speedup", "max_slowdown", "batch_sizes", "device", "rtol", "atol", "time_budget"),
)

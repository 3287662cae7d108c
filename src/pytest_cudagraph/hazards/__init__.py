"""The hazards that CUDA graphs bring: the catalogue, and the rules for one dispatched operation."""

from pytest_cudagraph.hazards.catalogue import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CATALOGUE,
    FOREIGN_GENERATOR_TEXT,
    HIDDEN_WRITE_TEXT,
    NESTED_REPLAY_TEXT,
    RNG_STATE_TEXT,
    UNPINNED_COPY_TEXT,
    CudaError,
    Hazard,
    RawFinding,
)
from pytest_cudagraph.hazards.rules import is_judged, judge, refusal

"""What CUDA graphs forbid or freeze: the catalogue of hazards, and the rules for one dispatched operation."""

from pytest_cudagraph.hazards.catalogue import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CATALOGUE,
    FOREIGN_GENERATOR_TEXT,
    RNG_STATE_TEXT,
    UNPINNED_COPY_TEXT,
    CudaError,
    Hazard,
)
from pytest_cudagraph.hazards.rules import Refusal, is_judged, judge, refusal, remark

__all__ = [
    "CAPTURE_IMPLICIT",
    "CAPTURE_INVALIDATED",
    "CAPTURE_ISOLATION",
    "CAPTURE_UNJOINED",
    "CAPTURE_UNSUPPORTED",
    "CATALOGUE",
    "FOREIGN_GENERATOR_TEXT",
    "RNG_STATE_TEXT",
    "UNPINNED_COPY_TEXT",
    "CudaError",
    "Hazard",
    "Refusal",
    "is_judged",
    "judge",
    "refusal",
    "remark",
]

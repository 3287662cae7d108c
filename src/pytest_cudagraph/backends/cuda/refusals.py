"""Errors of torch and CUDA at capture, to refusals with the hazard's id and the user's line."""

from __future__ import annotations

from pytest_cudagraph.backends.cuda.diagnosis import Diagnosis
from pytest_cudagraph.errors import CaptureRefusal
from pytest_cudagraph.hazards import CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED
from pytest_cudagraph.sources import user_site_of

_CUDA_PREFIXES = ("CUDA error: ", "CUDA driver error: ", "HIP error: ")

# What torch or CUDA say, and the hazard it means. The first text found decides; each was read in torch's sources.
_TEXTS = (
    ("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "host-data"),
    ("generator not in capture mode", "rng"),
    ("CUDAGeneratorImpl", "rng"),
    ("Offset increment outside graph capture", "rng"),
    ("Expected all tensors to be on the same device", "foreign-tensor"),
    (CAPTURE_UNSUPPORTED.text, "host-sync"),
)
_OTHER = "unknown-op"


def is_unspecific(error: BaseException) -> bool:
    """Whether CUDA's text leaves open which operation was refused (error 900), or only echoes it (901)."""
    text = str(error)
    return CAPTURE_UNSUPPORTED.text in text or CAPTURE_INVALIDATED.text in text


def refusal_of(error: BaseException, diagnosis: Diagnosis | None = None) -> CaptureRefusal:
    """The refusal that ``error`` amounts to; ``diagnosis`` names the operation where CUDA does not."""
    hazard = diagnosis.hazard if diagnosis else _hazard_of(str(error))
    operation = diagnosis.operation if diagnosis else ""
    site = user_site_of(error)
    # An echo is raised by whatever comes next; the operation refused first is the one to look at.
    if diagnosis and (site is None or CAPTURE_INVALIDATED.text in str(error)):
        site = diagnosis.site
    return CaptureRefusal(text_of(error), hazard=hazard, operation=operation, site=site)


def text_of(error: BaseException) -> str:
    """CUDA's own words: the first line, without torch's advice on debugging; foreign errors with their class."""
    lines = str(error).strip().splitlines()
    first = lines[0].partition(" (Triggered internally")[0] if lines else ""
    for prefix in _CUDA_PREFIXES:
        if first.startswith(prefix):
            return first.removeprefix(prefix)
    if isinstance(error, RuntimeError | Warning) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _hazard_of(text: str) -> str:
    return next((hazard for known, hazard in _TEXTS if known in text), _OTHER)

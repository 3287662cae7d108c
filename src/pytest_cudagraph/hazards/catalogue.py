"""The thirteen hazards by their stable ids, and the words CUDA and PyTorch use when they refuse a capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """One entry of the catalogue: ``loud`` where CUDA itself refuses, silent where the replay goes wrong unsaid."""

    id: str
    loud: bool
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """An error code of the CUDA runtime (``cudaError_t``) with the text of ``cudaGetErrorString``."""

    code: int
    name: str
    text: str


CAPTURE_UNSUPPORTED = CudaError(
    code=900, name="cudaErrorStreamCaptureUnsupported", text="operation not permitted when stream is capturing"
)
CAPTURE_INVALIDATED = CudaError(
    code=901, name="cudaErrorStreamCaptureInvalidated", text="operation failed due to a previous error during capture"
)
CAPTURE_UNJOINED = CudaError(
    code=904, name="cudaErrorStreamCaptureUnjoined", text="capturing stream has unjoined work"
)  # fmt: skip
CAPTURE_ISOLATION = CudaError(
    code=905, name="cudaErrorStreamCaptureIsolation", text="dependency created on uncaptured work in another stream"
)
CAPTURE_IMPLICIT = CudaError(
    code=906,
    name="cudaErrorStreamCaptureImplicit",
    text="operation would make the legacy stream depend on a capturing blocking stream",
)

# PyTorch's own sentences, raised before CUDA is asked.
UNPINNED_COPY_TEXT = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
)
FOREIGN_GENERATOR_TEXT = "Attempt to increase offset for a CUDA generator not in capture mode"
RNG_STATE_TEXT = "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture"

_ENTRIES = (
    Hazard(
        id="host-sync",
        loud=True,
        what="the host waits for a value of the device, which a capturing stream cannot give",
        fix="keep the value on the device: torch.where, torch.cond, the *_ex functions of torch.linalg",
    ),
    Hazard(
        id="dynamic-shape",
        loud=True,
        what="a size depends on values, but a graph has fixed sizes",
        fix="use a fixed size: torch.where(mask, x, 0), topk, a mask, output_size=",
    ),
    Hazard(
        id="host-data",
        loud=True,
        what="data of the host is copied to the device inside the call",
        fix="make it once in __init__ with register_buffer, or on the device with torch.full or torch.arange",
    ),
    Hazard(
        id="control-flow",
        loud=False,
        what="the operations differ between calls; a replay always runs the captured ones",
        fix="decide with torch.where or torch.cond on a tensor, or capture one graph per branch",
    ),
    Hazard(
        id="baked-scalar",
        loud=False,
        what="a number of the host differs between equal calls; a replay always uses the captured one",
        fix="keep the number in a 0-dim device tensor and change it in place",
    ),
    Hazard(
        id="rng",
        loud=True,
        what="random numbers that a replay cannot draw as eager does",
        fix="draw from the default generator, and seed or save its state outside the model",
    ),
    Hazard(
        id="mutates-state",
        loud=False,
        what="the call writes to a parameter, a buffer or another tensor that outlives it",
        fix="write by operations of torch, which replays repeat; if no write is meant: eval() or clone",
    ),
    Hazard(
        id="rebinds-state",
        loud=False,
        what="the storage of a parameter, a buffer or a kept tensor is replaced; a replay uses the old one",
        fix="write in place with copy_ instead of assigning a new tensor",
    ),
    Hazard(
        id="mutates-input",
        loud=False,
        what="the call writes to its own input",
        fix="clone the input before writing to it",
    ),
    Hazard(
        id="output-alias",
        loud=False,
        what="an output shares memory with an input or with state",
        fix="return a clone",
    ),
    Hazard(
        id="stateful-python",
        loud=False,
        what="the call changes Python state of the model; a replay runs no Python and leaves it as it is",
        fix="return what should be kept, or count in a buffer",
    ),
    Hazard(
        id="foreign-tensor",
        loud=False,
        what="a tensor is read that is neither input nor state of the model; a replay reads its old memory",
        fix="register it as a buffer, or pass it as an input",
    ),
    Hazard(
        id="unknown-op",
        loud=True,
        what="something runs whose inside cannot be judged",
        fix="see for yourself that it neither synchronises nor uses another stream",
    ),
)

CATALOGUE: Mapping[str, Hazard] = MappingProxyType({entry.id: entry for entry in _ENTRIES})
"""Every hazard by its id, loud ones and silent ones."""

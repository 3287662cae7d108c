"""The sixteen hazards by their stable ids, and the error texts of CUDA and PyTorch for a refused capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pytest_cudagraph.values import Level, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """One entry of the catalogue. CUDA refuses a ``loud`` hazard. Others make the replay wrong without an error."""

    id: str
    loud: bool
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFinding:
    """One occurrence of a hazard. The audit merges those with the same hazard and line into one finding.

    ``error`` means that CUDA refuses the capture or the replay is wrong. A ``warning`` means that a later replay may be
    wrong, and no call shows it. A ``note`` is legal.
    """

    id: str
    text: str
    operation: str = ""
    level: Level = "error"
    site: Site | None = None
    called_from: Site | None = None

    @property
    def evidence(self) -> str:
        """``aten.item: operation not permitted when stream is capturing``."""
        return f"{self.operation}: {self.text}" if self.operation else self.text

    def seen_in(self, where: str) -> RawFinding:
        """The same finding with ``where`` in front of its evidence, such as ``another batch size``."""
        return replace(self, operation=where, text=self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """An error code of the CUDA runtime (``cudaError_t``) with its text from ``cudaGetErrorString``."""

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

# PyTorch raises these before it calls CUDA.
UNPINNED_COPY_TEXT = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
)
FOREIGN_GENERATOR_TEXT = "Attempt to increase offset for a CUDA generator not in capture mode"
RNG_STATE_TEXT = "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture"

NESTED_REPLAY_TEXT = "Cannot prepare for replay during capturing stage"

HIDDEN_WRITE_TEXT = "{name} changed, and no torch operation wrote it"
"""What NumPy, DLPack, ctypes or C code write through an address is in no graph."""

_ENTRIES = (
    Hazard(
        id="host-sync",
        loud=True,
        what="the host waits for the device, which is not possible during capture",
        fix="keep the value on the device: use torch.where or the *_ex functions of torch.linalg",
    ),
    Hazard(
        id="dynamic-shape",
        loud=True,
        what="a tensor size depends on tensor values, but a graph has fixed sizes",
        fix="use a fixed size: torch.where(mask, x, 0), topk, a mask or output_size=",
    ),
    Hazard(
        id="host-data",
        loud=True,
        what="the call copies data from the host to the device",
        fix="create the data once in __init__ with register_buffer, or on the device with torch.full or torch.arange",
    ),
    Hazard(
        id="control-flow",
        loud=False,
        what="the calls run different operations, but a replay always runs the captured ones",
        fix="compute both branches and decide with torch.where, or capture one graph per branch",
    ),
    Hazard(
        id="baked-scalar",
        loud=False,
        what="a Python number differs between equal calls, but a replay always uses the captured one",
        fix="keep the number in a 0-dim tensor on the device and change it in place",
    ),
    Hazard(
        id="rng",
        loud=True,
        what="the call uses random numbers in a way that a replay cannot repeat",
        fix="draw from the default generator, and seed it or save its state outside the model",
    ),
    Hazard(
        id="mutates-state",
        loud=False,
        what="the call writes to a parameter, a buffer or another tensor that the model keeps",
        fix="none needed, because replays repeat the write. If you want no write, call eval() or clone()",
    ),
    Hazard(
        id="hidden-write",
        loud=False,
        what="the call writes to memory without a torch operation, and a replay does not",
        fix="write with torch operations, or make the code an operator with torch.library.custom_op and mutates_args",
    ),
    Hazard(
        id="rebinds-state",
        loud=False,
        what="a parameter, a buffer or a kept tensor gets new memory, but a replay uses the old memory",
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
        what="the call changes Python state of the model, but a replay runs no Python",
        fix="return it as a tensor, or keep it in a buffer",
    ),
    Hazard(
        id="foreign-tensor",
        loud=False,
        what="the call reads a tensor that is neither input nor state, and a replay reads its old memory",
        fix="register it as a buffer, or pass it as an input",
    ),
    Hazard(
        id="collective",
        loud=False,
        what="the call waits for other processes, which need not make as many calls as this test",
        fix="test one rank alone: with world_size=1 each collective is an operation of the graph",
    ),
    Hazard(
        id="nested-graph",
        loud=False,
        what="the call replays a graph of its own, so that a test would compare graphs and not eager",
        fix="test the model itself, and replay graphs outside of it",
    ),
    Hazard(
        id="unknown-op",
        loud=True,
        what="the call runs code that the audit cannot look into",
        fix="check that the code does not synchronise and uses no other stream",
    ),
)

CATALOGUE: Mapping[str, Hazard] = MappingProxyType({entry.id: entry for entry in _ENTRIES})
"""Every hazard by its id."""

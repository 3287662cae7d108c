"""Choose the device of a run, and describe it. No GPU has run this code yet."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_cudagraph import environment
from pytest_cudagraph.environment import start_nvml, stop_nvml
from pytest_cudagraph.errors import DeviceUnavailable
from pytest_cudagraph.foreign import first_line_of
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import DeviceInfo, Kind, is_emulated

DeviceOption = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The device of a run. ``judged`` says whether the run judges speed, and ``reason`` why."""

    kind: Kind
    judged: bool
    reason: str


def choose(option: str, *, require_gpu: bool = False) -> Choice:
    """The device for ``auto``, ``cuda`` or ``cpu``.

    ``auto`` without a usable GPU is a rehearsal on the CPU, where speed is not judged. With ``cpu`` it is judged.
    An emulated CUDA device is used as a GPU is, and speed is not judged.
    Raises :class:`~pytest_cudagraph.errors.DeviceUnavailable` when no GPU can be used, for ``cuda``, and with
    ``require_gpu`` for every option: a broken runner must not pass, even if a test uses the CPU.
    """
    if option not in ("auto", "cuda", "cpu"):
        raise DeviceUnavailable(f"there is no device {option!r}; devices are auto, cuda and cpu")
    missing = why_no_gpu() if require_gpu or option != "cpu" else None
    if missing is not None and (require_gpu or (option == "cuda" and missing != EMULATED)):
        raise DeviceUnavailable(_unavailable_text(option, missing))
    if option == "cpu":
        return Choice(kind="cpu", judged=True, reason="the CPU was requested: its latencies are judged")
    if missing is None:
        return Choice(kind="cuda", judged=True, reason="a GPU is available")
    if missing == EMULATED:
        return Choice(kind="cuda", judged=False, reason=f"this is {EMULATED.found}")
    return Choice(kind="cpu", judged=False, reason=f"rehearsal on the CPU: {missing.found}")


def describe(kind: Kind) -> DeviceInfo:
    """Describe the current GPU, or the host's CPU."""
    is_cuda = kind == "cuda"
    host_cpu = environment.host_cpu_name()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if is_cuda else None
    power_limit_w, clocks = _limits(gpu) if gpu else (None, None)
    return DeviceInfo(
        kind=kind,
        name=gpu.name if gpu else host_cpu,
        driver=driver_version() if is_cuda else None,
        cuda=torch.version.cuda if is_cuda else None,
        torch=environment.torch_version(),
        python=environment.python_version(),
        host_cpu=host_cpu,
        platform=environment.platform_text(),
        threads=torch.get_num_threads(),
        mig=_mig_profile(gpu.name) if gpu else None,
        power_limit_w=power_limit_w,
        clocks=clocks,
    )


def _mig_profile(name: str) -> str | None:
    """``1g.18gb`` for ``NVIDIA H200 MIG 1g.18gb``."""
    return name.partition(" MIG ")[2].strip() or None


def _limits(gpu: Any) -> tuple[int | None, str | None]:
    """The enforced power limit in watts and the clock policy of a GPU, or None where NVML does not know them.

    NVML tells application clocks (``nvidia-smi -ac``), but not locked clocks (``-lgc``).
    """
    nvml = start_nvml()
    if isinstance(nvml, str):
        return None, None
    try:
        handle = nvml_handle(nvml, gpu)
        limit_mw = _number(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
        graphics = getattr(nvml, "NVML_CLOCK_GRAPHICS", 0)
        set_mhz = _number(nvml, "nvmlDeviceGetApplicationsClock", handle, graphics)
        default_mhz = _number(nvml, "nvmlDeviceGetDefaultApplicationsClock", handle, graphics)
    except (nvml.NVMLError, AttributeError):
        # Some builds of torch know no UUID, and a container may hide a GPU from NVML.
        return None, None
    finally:
        stop_nvml(nvml)
    return None if limit_mw is None else round(limit_mw / 1000), _clock_policy(set_mhz, default_mhz)


def _number(nvml: Any, call: str, *arguments: Any) -> int | None:
    """The result of one NVML call, or None where NVML or its bindings lack it."""
    try:
        return int(getattr(nvml, call)(*arguments))
    except (nvml.NVMLError, AttributeError):
        return None


def _clock_policy(set_mhz: int | None, default_mhz: int | None) -> str | None:
    if set_mhz is None or default_mhz is None:
        return None
    return "default clocks" if set_mhz == default_mhz else f"application clock {set_mhz} MHz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Why no GPU can be used, and the remedy."""

    found: str
    remedy: str


EMULATED = Missing(
    found="an emulated CUDA device, which is no GPU",
    remedy="use an environment without the emulated device, on a machine with a GPU",
)


def why_no_gpu() -> Missing | None:
    """None if a GPU runs a first operation, which creates a CUDA context.

    ``EMULATED`` if the CUDA device runs it but is no GPU.
    """
    version = torch.__version__
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return Missing(
            found=f"torch {version} is built without CUDA",
            remedy="install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    with warnings.catch_warnings(record=True) as caught:
        # Torch explains a driver problem in a warning, and returns only False.
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        return _invisible([str(warning.message) for warning in caught])
    try:
        torch.ones(1, device="cuda").item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return Missing(
            found=f"a GPU is visible, but its first operation failed: {_first_line(error)}",
            remedy="check that this build of torch supports the GPU and its driver, and no other process blocks it",
        )
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    return EMULATED if is_emulated(name) else None


def driver_version() -> str | None:
    """``580.159``, or None where NVML does not know it."""
    nvml = start_nvml()
    if not isinstance(nvml, str):
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            return None
        finally:
            stop_nvml(nvml)
    return None


def _invisible(warned: list[str]) -> Missing:
    nvml = start_nvml()
    if isinstance(nvml, str):
        return Missing(
            found=f"the NVIDIA driver does not respond ({nvml})",
            remedy="install the driver, or give the container access to its GPUs (docker run --gpus all)",
        )
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        count = 0
    finally:
        stop_nvml(nvml)
    if not count:
        return Missing(found="the driver finds no GPU", remedy="check the output of nvidia-smi on this machine")
    gpus, visible = plural(count, "GPU"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return Missing(
            found=f"the driver finds {gpus}, but CUDA_VISIBLE_DEVICES={visible!r} hides them from torch",
            remedy="unset CUDA_VISIBLE_DEVICES, or name a GPU that nvidia-smi -L lists",
        )
    return Missing(
        found=f"the driver finds {gpus}, but torch finds none: {_first_line(*warned) or 'it gives no reason'}",
        remedy="install the driver that this build of torch requires",
    )


def _unavailable_text(option: str, missing: Missing) -> str:
    if missing == EMULATED or option != "cuda":
        request = "--cudagraph-require-gpu requires a GPU"
    else:
        request = "the device cuda was requested"
    otherwise = "use --cudagraph-device=auto, which falls back to the CPU"
    if missing == EMULATED:
        otherwise = "leave out --cudagraph-require-gpu: speed is then not judged"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    return f"{request}, and no GPU can be used\nfound: {missing.found}; {setting}\n{missing.remedy}; or {otherwise}"


def nvml_handle(nvml: Any, gpu: Any) -> Any:
    """NVML's handle of a GPU, or of a part of one (MIG), from torch's properties. NVML has other GPU indices.

    Raises ``NVMLError`` if NVML does not know the GPU, and AttributeError if torch knows no UUID.
    """
    uuid = str(gpu.uuid)
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        # CUDA gives the UUID of a part (MIG) without its prefix.
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _first_line(*texts: object) -> str:
    return first_line_of("\n".join(map(str, texts))).partition(" (Triggered")[0]

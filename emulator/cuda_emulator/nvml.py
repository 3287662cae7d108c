"""What the emulated NVML answers, for tests of monitors.

The environment variable ``CUDA_EMULATOR_NVML`` names a file that the library reads at each call. Processes that are
started within :func:`answering` read it too. A line is the name of a function of NVML and its answer::

    nvmlDeviceGetPowerUsage 250000
    nvmlDeviceGetClockInfo.1 600                         for its argument 1 (NVML_CLOCK_SM)
    1:nvmlDeviceGetTemperature 80                        for device 1
    nvmlDeviceGetComputeRunningProcesses 4242:1048576    other processes and their bytes, beside this one
    nvmlDeviceGetMigMode error 3                         NVML's code of an error
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "CUDA_EMULATOR_NVML"
Answer = int | str | Mapping[int, int]
"""A number, ``error 3``, or the bytes that other processes hold, by their process id."""


@contextmanager
def answering(answers: Mapping[str, Answer]) -> Iterator[Callable[[Mapping[str, Answer]], None]]:
    """Within the block NVML answers so. Gives a function that replaces all answers."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers")

        def replace(answers: Mapping[str, Answer]) -> None:
            lines = [f"{name} {_text(answer)}\n" for name, answer in answers.items()]
            new = path.with_suffix(".new")
            new.write_text("".join(lines), encoding="ascii")
            new.replace(path)  # no reader sees half of it

        replace(answers)
        os.environ[VARIABLE] = str(path)
        try:
            yield replace
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


def _text(answer: Answer) -> str:
    if isinstance(answer, Mapping):
        return " ".join(f"{pid}:{held_bytes}" for pid, held_bytes in answer.items())
    return str(answer)

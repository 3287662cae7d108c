"""``-p cuda_emulator.pytest_plugin``: fails a test that launched a kernel which computed nothing, or broke the device.

A test marked ``needs_speed``, ``needs_triton`` or ``needs_nvml`` is skipped with the marker's reason.
"""

from __future__ import annotations

import pytest

import cuda_emulator

MARKERS = ("needs_speed", "needs_triton", "needs_nvml")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in MARKERS:
        marker = item.get_closest_marker(name)
        if marker is not None:
            pytest.skip(f"{name}: {marker.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    before = cuda_emulator.unknown_launches()
    result = yield
    after = cuda_emulator.unknown_launches()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    if cuda_emulator.clear_error():
        pytest.fail("a kernel failed, and the test did not clear the device's error")
    if new:
        pytest.fail("launched kernels that computed nothing: " + ", ".join(f"{n} x {k}" for k, n in new.items()))
    return result


def pytest_terminal_summary(terminalreporter) -> None:
    unknown = sum(cuda_emulator.unknown_launches().values())
    terminalreporter.write_line(f"emulated CUDA device: {cuda_emulator.launches()} launches, {unknown} not emulated")

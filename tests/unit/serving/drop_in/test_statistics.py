"""The statistics in words."""

from __future__ import annotations

from pytest_cudagraph import CompilerStatistics, ModelStatistics


def model(**changed):
    given = {
        "name": "ranker",
        "mode": "reduce-overhead",
        "compile_mode": "inductor",
        "device": "cuda:0",
        "paths": {"graph": 90, "compiled": 2, "eager": 8},
        "reasons": {"capture refused": 3, "beyond the largest batch size": 7},
        "padded": 12,
        "compiled_sizes": (1, 8),
        "compile_ns": 12_300_000_000,
        "capture_ns": 51_000_000,
        "memory_bytes": {8: 2048, 1: 512},
        "notes": ("not captured: batch 4: operation not permitted when stream is capturing",),
    }
    return ModelStatistics(**{**given, **changed})


def bare(**changed):
    nothing = {"device": "", "paths": {}, "reasons": {}, "padded": 0, "compiled_sizes": (), "notes": ()}
    return model(
        mode="none", compile_mode="none", memory_bytes={}, compile_ns=0, capture_ns=0, **{**nothing, **changed}
    )


def test_in_words(golden):
    found = CompilerStatistics(models=(model(), bare(name="idle")), unknown=1)
    golden("integrated/statistics.txt", "\n".join(found.lines()))


def test_nothing_served_is_no_line():
    assert CompilerStatistics(models=(), unknown=0).lines() == []


def test_all_calls_are_counted():
    found = CompilerStatistics(models=(model(), bare(paths={"eager": 1})), unknown=2)
    assert found.paths == {"graph": 90, "compiled": 2, "eager": 11}
    assert found.calls == 103


def test_memory_that_no_device_tells_is_left_out():
    assert model(memory_bytes={1: None}).lines()[2].startswith("  graphs: batch 1; compiled:")

"""Facts to build reports from, for tests of what is said and kept about them."""

from __future__ import annotations

from dataclasses import replace

from pytest_cudagraph.baseline import session_of_arm
from pytest_cudagraph.decoding.guided_results import Guided, GuidedOutput, GuidedTimes
from pytest_cudagraph.decoding.modes.results import EngineMode, EngineModes, ModeFailure, ModeTokens
from pytest_cudagraph.decoding.results import (
    Generation,
    GenerationReceipt,
    GenerationTimes,
    Lookup,
    Prefill,
    PrefillBytes,
    TokenAgreement,
)
from pytest_cudagraph.values import (
    Agreement,
    BatchReport,
    DeviceInfo,
    GraphReport,
    Interval,
    Judgement,
    Latency,
    Medians,
    Receipt,
    SavedBatch,
    SavedFigure,
    Session,
    Timing,
    Verdict,
)

H200 = DeviceInfo(
    kind="cuda",
    name="NVIDIA H200",
    driver="580.159",
    cuda="13.0",
    torch="2.11.0",
    python="3.12.3",
    host_cpu="Intel(R) Xeon(R) Platinum 8481C",
    platform="Linux-6.8-x86_64",
    threads=16,
)

CPU = DeviceInfo(
    kind="cpu",
    name="AMD EPYC 9B45",
    driver=None,
    cuda=None,
    torch="2.13.0+cpu",
    python="3.11.2",
    host_cpu="AMD EPYC 9B45",
    platform="Linux-6.8-x86_64",
    threads=2,
)

EMULATED = replace(H200, name="Emulated CUDA device (host memory)", driver="0.0-emulated", torch="2.13.0+cu130")

SAVED_AT = "2026-11-21T09:00:00+00:00"


def latency(median_us: float, samples: int = 200) -> Latency:
    median_ns = median_us * 1e3
    return Latency(
        samples=samples,
        minimum_ns=median_ns * 0.97,
        q25_ns=median_ns * 0.99,
        median_ns=median_ns,
        q75_ns=median_ns * 1.02,
        q90_ns=median_ns * 1.1,
    )


def timing(eager_us: float = 120.0, replay_us: float = 60.0, compiled_us: float | None = None) -> Timing:
    ratio = eager_us / replay_us
    return Timing(
        eager=latency(eager_us),
        replay=latency(replay_us),
        compiled=None if compiled_us is None else latency(compiled_us),
        medians=Medians(
            eager_ns=eager_us * 1000, replay_ns=replay_us * 1000, compiled_ns=compiled_us and compiled_us * 1000
        ),
        speedup=Interval(estimate=ratio, low=ratio * 0.98, high=ratio * 1.02),
        decision="pass",
        target_ratio=1.15,
        blocks=34,
        noise_ratio=0.004,
        detectable_ratio=0.01,
        measure_ns=900_000_000,
        seed=7,
    )


def judgement(verdict: Verdict = Verdict.PASSED, *, gate: str = "speedup", reason: str = "", **rest) -> Judgement:
    return Judgement(gate=gate, verdict=verdict, reason=reason or f"{gate} {verdict.value}", **rest)


def batch(batch_size: int = 8, *judgements: Judgement, **rest) -> BatchReport:
    facts = {
        "judgements": judgements or (judgement(gate="check"), judgement()),
        "min_speedup": 1.15,
        "receipt": Receipt(
            batch_size=batch_size,
            operations=50,
            kernels=46,
            kernel_names={"aten.mul": 40, "aten.addmm": 6},
            capture_ns=12_000_000,
            memory_bytes=4096,
        ),
        "agreement": Agreement(
            batch_size=batch_size, replays=4, leaves=1, state_tensors=6, bit_exact=True, eager_repeatable=True
        ),
        "timing": timing(),
    }
    return BatchReport(batch_size=batch_size, **facts | rest)


def times(ttft_us: float = 900.0, itl_us: float = 60.0) -> GenerationTimes:
    return GenerationTimes(
        generations=5, ttft=latency(ttft_us), itl=latency(itl_us), itl_p99_ns=itl_us * 1250, tpot_ns=itl_us * 1017,
        time_per_token=latency(itl_us / 7.5),
    )  # fmt: skip


def generation(**rest) -> Generation:
    facts = {
        "batch_size": 8,
        "prompt_length": 16,
        "output_length": 32,
        "receipt": GenerationReceipt(steps=31, replays=31, padded_rows=1),
        "tokens": TokenAgreement(compared=256, same_shapes=False, ties=2, largest_difference=1e-5, tolerance=2e-5),
        "times": times(),
        "bytes": PrefillBytes(activations_bytes=3 << 20, cache_bytes=1 << 20, weights_bytes=40 << 20),
    }
    return Generation(**facts | rest)


def prefill() -> Prefill:
    whole = PrefillBytes(activations_bytes=6 << 30, cache_bytes=4 << 30, weights_bytes=15 << 30)
    return Prefill(
        prompt_length=32768, chunk=2048, counting="activations+cache", whole=whole,
        chunked=replace(whole, activations_bytes=360 << 20), largest_difference=0.0, tolerance=1e-5,
    )  # fmt: skip


def lookup() -> Lookup:
    return Lookup(
        batch_size=2, prompt_length=12, output_length=20, k=3,
        receipt=GenerationReceipt(steps=10, replays=10), tokens=TokenAgreement(compared=40, same_shapes=False),
        verified=6, drafted=30, accepted=18,
    )  # fmt: skip


def guided(**rest) -> Guided:
    good = GuidedOutput(text='{"age": 36}', is_cut=False)
    facts = {
        "batch_size": 4, "prompt_length": 16, "output_length": 32, "grammar": "json_schema", "vocabulary": 32000,
        "receipt": GenerationReceipt(steps=31, replays=31), "choices": GenerationReceipt(steps=32, replays=32),
        "outputs": (
            good, good, GuidedOutput(text='{"age": "', is_cut=True),
            GuidedOutput(text='{"age": \t6}', is_cut=False, problem="JSONDecodeError: Invalid control character"),
        ),
        "is_parsed": True, "tokens": TokenAgreement(compared=128, same_shapes=True), "times": guided_times(),
    }  # fmt: skip
    return Guided(**facts | rest)


def guided_times() -> GuidedTimes:
    return GuidedTimes(
        greedy=latency(60.0), guided=latency(63.0), overhead=Interval(estimate=0.05, low=0.04, high=0.06),
        mask_ns=700.0, mask_share=0.044,
    )  # fmt: skip


MODE_FAILURE = ModeFailure(
    stage="load", error="RuntimeError: out of memory in the capture", is_raised=True, output=("one", "two")
)


def modes(**rest) -> EngineModes:
    eager = EngineMode(
        load_ns=2_100_000_000, host_bytes=400 << 20, times=times(950.0, 120.0),
        itl_medians_ns=(118e3, 119e3, 120e3, 121e3, 123e3),
        receipt=GenerationReceipt(steps=93, replays=0, eager={"the eager mode": 93}),
    )  # fmt: skip
    graphs = EngineMode(
        load_ns=2_600_000_000, capture_ns=310_000_000, host_bytes=420 << 20, device_bytes=3 << 30, times=times(),
        itl_medians_ns=(59e3, 60e3, 60e3, 60e3, 61e3), receipt=GenerationReceipt(steps=93, replays=93),
    )  # fmt: skip
    facts = {
        "engine": "counting", "batch_size": 2, "output_length": 32, "rounds": 2, "eager": eager, "graphs": graphs,
        "tokens": ModeTokens(rows=2, differing_rows=0), "speedup": Interval(estimate=2.0, low=1.93, high=2.08),
    }  # fmt: skip
    return EngineModes(**facts | rest)


def report(name: str = "tests/test_a.py::test_a", *batches: BatchReport, **rest) -> GraphReport:
    facts = {"nodeid": name, "name": name, "device": H200, "compile_mode": "none", "batches": batches or (batch(),)}
    return GraphReport(**facts | rest)


def saved(name: str = "tests/test_a.py::test_a", batch_size: int = 8, **rest) -> SavedBatch:
    facts = {
        "eager": latency(120.0),
        "replay": latency(60.0),
        "compiled": None,
        "speedup": Interval(estimate=2.0, low=1.96, high=2.04),
        "kernels": 46,
        "kernel_names": {"aten.mul": 40, "aten.addmm": 6},
        "device": H200,
        "saved_at": SAVED_AT,
    }
    facts |= rest
    facts.setdefault("sessions", (one_session(facts["replay"], facts["device"], facts["saved_at"]),))
    return SavedBatch(name=name, batch_size=batch_size, **facts)


def one_session(replay: Latency, device: DeviceInfo, saved_at: str) -> Session:
    return session_of_arm(replay, None, device.software, date=saved_at[:10])


def sessions(*medians_us: float, reference_us: float | None = None, device: DeviceInfo = H200) -> tuple[Session, ...]:
    """A session a day, each with this median; lower quartiles 1 % below, as in :func:`latency`."""
    return tuple(
        Session(
            date=f"2026-11-{day:02}",
            commit=f"{day:07x}",
            software=device.software,
            q25_ns=latency(median_us).q25_ns,
            median_ns=latency(median_us).median_ns,
            reference_q25_ns=None if reference_us is None else latency(reference_us).q25_ns,
            reference_median_ns=None if reference_us is None else latency(reference_us).median_ns,
        )
        for day, median_us in enumerate(medians_us, start=1)
    )


def with_figures(entry: SavedBatch, **medians_us: float) -> SavedBatch:
    """Each session of an entry with these figures of a generation."""
    figures = {
        name: SavedFigure(q25_ns=latency(median).q25_ns, median_ns=latency(median).median_ns)
        for name, median in medians_us.items()
    }
    return replace(entry, sessions=tuple(replace(each, figures=figures) for each in entry.sessions))


def by_key(*entries: SavedBatch) -> dict[tuple[str, int], SavedBatch]:
    return {(entry.name, entry.batch_size): entry for entry in entries}

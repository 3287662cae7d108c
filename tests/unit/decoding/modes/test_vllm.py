"""The adapter for vLLM, on a stand-in with its interface and its failures. The nightly run has vLLM itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_cudagraph import InputError, vllm
from pytest_cudagraph.decoding.modes.engines import LoadRequest
from pytest_cudagraph.decoding.modes.mode_run import ModeRequest, run_mode
from pytest_cudagraph.decoding.modes.vllm_engine import environment_of
from pytest_cudagraph.decoding.results import GenerationReceipt

STAND_INS = Path(__file__).parents[3] / "stand_ins"
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
TOKENS = [(6, 7, 8, 9, 10), (9, 10, 11, 12, 13), (30, 31, 32, 33, 34)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))


def run(model, *, graphs=True, device="cuda:0", **arguments):
    load = LoadRequest(graphs=graphs, rows=3, device=device, threads=1)
    request = ModeRequest(engine=vllm(model), load=load, arguments=arguments, prompts=PROMPTS, count=5, generations=2)
    return run_mode(request, 60)


@pytest.mark.parametrize("graphs", [True, False])
def test_each_row_has_its_tokens_their_times_and_a_receipt_of_its_decode_steps(graphs):
    found = run("a-model", graphs=graphs)
    assert found.mode.failure is None
    assert [[row.tokens for row in generation] for generation in found.generations] == [TOKENS, TOKENS]
    for row in found.generations[0]:
        assert row.start_ns <= row.stamps_ns[0]
        assert list(row.stamps_ns) == sorted(set(row.stamps_ns))
    # Two rows start in the first step and one in the second. Four steps then decode, in each of 2 generations.
    eager = {} if graphs else {"vLLM's runtime mode was NONE": 8}
    assert found.mode.receipt == GenerationReceipt(
        steps=8, replays=8 if graphs else 0, padded_rows=1 if graphs else 0, eager=eager
    )
    assert found.mode.load_ns > 0
    assert found.mode.host_bytes > 1 << 20
    assert (found.mode.capture_ns, found.mode.capture_bytes) == ((7_200_000_000, 1 << 28) if graphs else (None, None))


@pytest.mark.parametrize(
    ("model", "receipt"),
    [
        # Its prefills run eagerly, also short ones of fewer tokens than rows.
        ("full-decode-only", GenerationReceipt(steps=8, replays=8, padded_rows=1)),
        ("piecewise", GenerationReceipt(steps=8, replays=8, piecewise=8, padded_rows=1)),
        # The steps that verify drafts have several tokens per row.
        ("speculates", GenerationReceipt(steps=8, replays=0, eager={"vLLM's runtime mode was NONE": 8})),
    ],
)
def test_decode_steps_are_those_without_a_prefill_by_the_mode_of_their_graph(model, receipt):
    assert run(model).mode.receipt == receipt


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cuda:0", {}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        ("cuda:1", {}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        (
            "cuda:1",
            {"CUDA_VISIBLE_DEVICES": "4,6", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            {"CUDA_VISIBLE_DEVICES": "6"},
        ),
        (
            "cpu",
            {"VLLM_CPU_OMP_THREADS_BIND": "0-3"},
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
        ),
    ],
)
def test_the_device_and_the_threads_of_the_run_are_vllms(monkeypatch, device, before, after):
    for key in ("CUDA_VISIBLE_DEVICES", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"):
        monkeypatch.delenv(key, raising=False)
    for key, value in before.items():
        monkeypatch.setenv(key, value)
    request = LoadRequest(graphs=True, rows=3, device=device, threads=1)
    assert environment_of(request, {}) == after
    # An engine of two GPUs chooses none.
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(request, {"tensor_parallel_size": 2})


def test_a_vllm_for_another_device_than_the_tests_is_refused(monkeypatch):
    with pytest.raises(InputError, match="found a vLLM for cuda: --cudagraph-device=cuda, or install another build"):
        run("a-model", device="cpu")
    monkeypatch.setenv("STAND_IN_VLLM_DEVICE", "cpu")
    assert run("a-model", device="cpu").mode.failure is None


def test_steps_without_a_graph_are_told_as_such():
    found = run("downgraded")
    assert found.mode.receipt.replays == 0
    assert found.mode.receipt.eager == {"vLLM's runtime mode was NONE": found.mode.receipt.steps}


@pytest.mark.parametrize(("model", "arguments"), [("silent-metrics", {}), ("a-model", {"disable_log_stats": True})])
def test_without_statistics_nothing_is_assumed(model, arguments):
    found = run(model, **arguments)
    assert found.mode.failure is None
    assert found.mode.receipt is None


def test_an_earlier_vllm_without_the_metrics_runs_too(monkeypatch):
    monkeypatch.setenv("STAND_IN_VLLM", "without metrics")
    found = run("a-model")
    assert (found.mode.failure, found.mode.receipt) == (None, None)


CORE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {} (__init__.py:"


@pytest.mark.parametrize(
    ("model", "stage", "error", "last"),
    [
        ("no-cache-memory", "load", CORE, "ValueError: No available memory for the cache blocks."),
        ("oom-in-capture", "load", CORE, "torch.OutOfMemoryError: CUDA out of memory."),
        ("dies-while-generating", "generate", "EngineDeadError: EngineCore encountered an issue.", ""),
    ],
)
def test_its_own_error_and_what_its_core_logged_are_kept(model, stage, error, last):
    failure = run(model).mode.failure
    assert (failure.stage, failure.is_raised) == (stage, True)
    assert failure.error.startswith(error)
    assert last in "\n".join(failure.output[-1:])


def test_without_graphs_the_capture_cannot_fail():
    assert run("oom-in-capture", graphs=False).mode.failure is None


def test_an_argument_that_it_does_not_know_is_its_own_error():
    failure = run("a-model", enforce_eagre=True).mode.failure
    assert "got an unexpected keyword argument 'enforce_eagre'" in failure.error


def test_a_missing_vllm_is_named(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(InputError, match="needs vLLM: pip install vllm"):
        run("a-model")


@pytest.mark.parametrize("model", ["", None, 3])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(InputError, match="vllm takes the name or the path of a model; found"):
        vllm(model)

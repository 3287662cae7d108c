"""A capture that fails on the fake: the refusal's words, and a process that can capture again."""

import gc
import sys
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from tests.fake_cuda import ECHO, REFUSED, UNDERWAY, FakeCuda, adds_one, capture, reads_a_scalar

from pytest_cudagraph.backends.cuda import CudaBackend
from pytest_cudagraph.backends.cuda.refusals import diagnose, refusal_of, text_of
from pytest_cudagraph.errors import CaptureRefusal, InputError

collect = gc.collect  # before the fixture replaces it

pytestmark = pytest.mark.usefixtures("no_collections")


def assert_fit(cuda, pool):
    """The process is as if no capture had failed."""
    assert (cuda.underway, cuda.generator_is_capturing, cuda.capturing) == ([], False, None)
    assert cuda.stream_now.name == "caller"
    assert gc.get_freeze_count() == 0
    assert capture(pool, adds_one)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_a_refused_capture_names_hazard_operation_and_the_users_line(cuda, pool):
    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, reads_a_scalar)
    refusal = raised.value
    assert refusal.text == "operation not permitted when stream is capturing"
    assert refusal.hazard == "host-sync"
    assert refusal.operation.startswith("aten.")
    assert refusal.site.file == reads_a_scalar.__code__.co_filename
    assert refusal.site.line == reads_a_scalar.__code__.co_firstlineno + 1
    assert isinstance(refusal.__cause__, RuntimeError)
    assert str(refusal.__cause__) == REFUSED


def test_after_a_refused_capture_the_next_one_succeeds(cuda, pool):
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert_fit(cuda, pool)


def test_after_a_refused_capture_earlier_graphs_of_the_pool_still_replay_and_keep_their_memory(cuda, pool):
    graph = capture(pool, adds_one)
    handle = cuda.graphs[0].handle
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert graph(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert_fit(cuda, pool)
    # The refused capture's handle may still count as being captured into: a later graph has one of its own.
    assert cuda.graphs[0].handle == handle != cuda.graphs[1].handle
    assert (cuda.shares[handle], cuda.shares[cuda.graphs[1].handle]) == (1, 1)


def test_the_clean_up_ends_the_allocation_gives_back_the_share_and_makes_a_test_capture(cuda, pool):
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    end = len(cuda.calls) - cuda.calls[::-1].index("end_allocation") - 1
    assert cuda.names()[end:] == [
        *("end_allocation", "reset", "synchronize", "release_pool", "synchronize"),
        *("wait_stream", "synchronize", "empty_cache", "capture_begin", "capture_end", "wait_stream"),
        *("reset", "synchronize"),
    ]


def test_without_the_clean_up_the_next_capture_would_fail(cuda, pool, monkeypatch):
    # Shows that the fake breaks as torch does, and hence that the tests above prove something.
    monkeypatch.setattr("pytest_cudagraph.backends.cuda.recording.recover", lambda *args, **kwargs: None)
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    with pytest.raises(RuntimeError, match="captures_underway"):
        capture(pool, adds_one)


def test_an_error_of_the_models_own_leaves_nothing_to_recover(cuda, pool):
    def model(x):
        if cuda.capturing:
            raise ValueError("only while capturing")
        return x + 1

    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert raised.value.text == "ValueError: only while capturing"
    assert raised.value.hazard == "unknown-op"
    assert raised.value.site.line == model.__code__.co_firstlineno + 2
    assert "end_allocation" not in cuda.names()
    assert_fit(cuda, pool)


def swallows_the_refusal(x):
    try:
        return x * x.sum().item()
    except RuntimeError:
        return x


def raises_an_echo(x):
    try:
        return x * x.sum().item()
    except RuntimeError:
        raise RuntimeError(ECHO) from None


@pytest.mark.parametrize("model", [swallows_the_refusal, raises_an_echo])
def test_a_refusal_that_the_model_swallowed_or_echoed_is_named_by_the_operation_refused_first(cuda, pool, model):
    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert raised.value.text == "operation failed due to a previous error during capture"
    assert raised.value.hazard == "host-sync"
    assert raised.value.site.line == model.__code__.co_firstlineno + 2
    assert_fit(cuda, pool)


# torch 2.13's next allocation, after a refusal that the model swallowed.
ASSERTED = (
    'info.status != cudaStreamCaptureStatusInvalidated INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":2213, '
    "please report a bug to PyTorch. Invalid stream capture status"
)


def test_an_assertion_of_the_allocator_after_a_swallowed_refusal_is_told_as_cudas_echo(cuda, pool):
    def model(x):
        with suppress(RuntimeError):
            return x * x.sum().item()
        raise RuntimeError(ASSERTED)

    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert raised.value.text == "operation failed due to a previous error during capture"
    assert raised.value.hazard == "host-sync"
    assert raised.value.site.line == model.__code__.co_firstlineno + 2
    assert_fit(cuda, pool)


UNPINNED = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."


@pytest.mark.parametrize(("source", "to", "hazard"), [("meta", "cpu", "host-sync"), ("cpu", "meta", "host-data")])
def test_a_refused_copy_is_named_by_its_direction(cuda, pool, source, to, hazard):
    """A tensor on the device ``meta`` stands for one on the GPU."""

    def copies(x):
        with suppress(NotImplementedError):
            torch.empty(2, device=to).copy_(torch.empty(2, device=source))
        if cuda.capturing:
            cuda.is_invalidated = True
            raise RuntimeError(UNPINNED)
        return x + 1

    copies.__code__ = copies.__code__.replace(co_filename="<torch>")  # torch's part has no Python frames
    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, lambda x: copies(x))
    assert (raised.value.text, raised.value.hazard) == (UNPINNED, hazard)
    assert_fit(cuda, pool)


def test_an_operation_at_another_line_than_the_error_is_not_its_cause(cuda, pool):
    generator = torch.Generator()

    def model(x):
        drawn = torch.rand(2, generator=generator)  # legal: the graph registers the generator
        return (x + drawn) * x.sum().item()

    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert (raised.value.hazard, raised.value.operation) == ("host-sync", "aten.item")
    assert raised.value.site.line == model.__code__.co_firstlineno + 2


def test_a_diagnosis_in_which_the_model_raises_still_names_what_came_first():
    def call():
        torch.ones(2).sum().item()
        raise KeyError("later")

    found = diagnose(call, lambda: 0)
    assert found.hazard == "host-sync"
    assert found.site.line == call.__code__.co_firstlineno + 1


def test_a_refusal_the_catalogue_does_not_know_is_told_in_cudas_words(cuda, pool):
    def model(x):
        if cuda.capturing:
            cuda.is_invalidated = True
            raise RuntimeError(REFUSED)
        return x + 1

    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, model)
    assert raised.value.text == "operation not permitted when stream is capturing"
    assert (raised.value.operation, raised.value.hazard) == ("", "host-sync")
    assert raised.value.site.line == model.__code__.co_firstlineno + 3
    # CUDA refuses new memory for another stream in the same words.
    assert raised.value.fix.startswith("if this line waits for the device, ")
    assert "; if it works on another stream, let the other stream wait" in raised.value.fix


def test_an_error_in_warm_up_is_the_models_own(cuda, pool):
    def model(x):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        capture(pool, model)
    assert "capture_begin" not in cuda.names()
    assert_fit(cuda, pool)


def test_an_interrupt_comes_through_and_leaves_the_process_fit(cuda, pool):
    def model(x):
        if cuda.capturing:
            cuda.is_invalidated = True
            raise KeyboardInterrupt
        return x + 1

    with pytest.raises(KeyboardInterrupt):
        capture(pool, model)
    assert_fit(cuda, pool)


def test_an_error_of_this_package_comes_through_as_it_is(cuda, pool):
    def model(x):
        if cuda.capturing:
            raise InputError("said by a graph inside the model")
        return x + 1

    with pytest.raises(InputError, match=r"^said by a graph inside the model$"):
        capture(pool, model)
    assert_fit(cuda, pool)


@pytest.mark.parametrize("call", ["synchronize", "empty_cache", "capture_begin", "capture_end"])
def test_whichever_call_fails_the_next_capture_succeeds(cuda, pool, call):
    capture(pool, adds_one)
    # The second capture's own calls: warm-up synchronises once before, and the memory reading empties once.
    skipped = {"synchronize": 1, "empty_cache": 1}.get(call, 0)
    cuda.failures[call] = [*[None] * skipped, RuntimeError("CUDA error: something else")]
    with pytest.raises(CaptureRefusal, match=r"^something else"):
        capture(pool, adds_one)
    assert_fit(cuda, pool)


def test_a_graph_that_cannot_be_instantiated_is_refused_and_released():
    cuda = FakeCuda(keeps_graphs=True, failures={"instantiate": [RuntimeError("CUDA out of memory. Tried")]})
    with CudaBackend(cuda=cuda, device="cpu", node_source=object()).pool() as pool:
        with pytest.raises(CaptureRefusal, match=r"^CUDA out of memory\. Tried"):
            capture(pool, adds_one)
        assert (cuda.graphs, set(cuda.shares.values())) == ([], {0})


def test_a_process_that_cannot_be_recovered_says_so_at_the_next_capture(cuda, pool):
    cuda.failures["end_allocation"] = [RuntimeError("no such binding")]
    with pytest.raises(CaptureRefusal, match=r"^operation not permitted"):
        capture(pool, reads_a_scalar)
    with pytest.raises(CaptureRefusal) as raised:
        capture(pool, adds_one)
    assert raised.value.text == (
        f"an earlier capture was refused and left this process unable to capture ({UNDERWAY}); "
        "run this test in a process of its own"
    )


@pytest.mark.parametrize("name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
def test_the_allocators_binding_is_found_under_either_name_also_where_torch_cuda_does_not_import_it(
    cuda, pool, monkeypatch, name
):
    monkeypatch.setattr(cuda, "memory", SimpleNamespace())
    monkeypatch.setattr(torch._C, name, cuda._end_allocation, raising=False)
    other = "_cuda_endAllocateToPool" if name.endswith("StreamToPool") else "_cuda_endAllocateCurrentStreamToPool"
    monkeypatch.delattr(torch._C, other, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", cuda._release_pool, raising=False)
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert cuda.underway == []
    assert capture(pool, adds_one).replay().tolist() == [2.0, 2.0]


def test_a_torch_without_the_binding_says_that_it_cannot_capture_any_more(cuda, pool, monkeypatch):
    monkeypatch.setattr(cuda, "memory", SimpleNamespace())
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    with pytest.raises(CaptureRefusal, match=r"^operation not permitted"):
        capture(pool, reads_a_scalar)
    with pytest.raises(CaptureRefusal, match="left this process unable to capture"):
        capture(pool, adds_one)


def test_a_share_in_a_pool_that_others_use_is_not_given_back_when_the_allocation_could_not_be_ended(cuda, pool):
    capture(pool, adds_one)
    cuda.failures["end_allocation"] = [RuntimeError("not recording")]
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert "release_pool" not in cuda.names()


def test_a_graph_whose_capture_never_ended_lives_on(cuda, pool):
    made = []

    class Graph(cuda.CUDAGraph):
        def __init__(self):
            super().__init__()
            made.append(weakref.ref(self))

    cuda.CUDAGraph = Graph
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    collect()
    assert [graph() is not None for graph in made] == [True, False]


def test_autocast_caches_again_after_a_refused_capture(pool):
    with pytest.raises(CaptureRefusal):
        capture(pool, reads_a_scalar)
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    ("text", "hazard"),
    [
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
            "host-data",
        ),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "rng"),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.", "rng"),
        ("Please ensure to utilize the CUDAGeneratorImpl::set_state_index method during capturing.", "rng"),
        (
            "RNG op during graph capture but generator is not registered with the capturing graph. "
            "Call graph.register_generator_state() before capture_begin().",
            "rng",
        ),
        ("Expected all tensors to be on the same device, but found at least two devices", "foreign-tensor"),
        (REFUSED, "host-sync"),
        ("CUDA error: capturing stream has unjoined work", "unknown-op"),
        ("CUDA error: dependency created on uncaptured work in another stream", "unknown-op"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "unknown-op"),
    ],
)
def test_texts_of_torch_and_cuda_become_hazards(text, hazard):
    refusal = refusal_of(RuntimeError(text))
    assert refusal.hazard == hazard
    assert refusal.text == text.splitlines()[0].removeprefix("CUDA error: ")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError(""), "RuntimeError"),
        (ValueError("no\nmore"), "ValueError: no"),
        (RuntimeError("CUDA error: device-side assert triggered\nadvice"), "device-side assert triggered"),
    ],
)
def test_a_refusal_speaks_in_one_line(error, text):
    assert text_of(error) == text


def test_the_site_is_none_when_only_torch_is_in_the_traceback():
    assert sys.modules["torch"] is torch
    assert refusal_of(RuntimeError("never raised")).site is None

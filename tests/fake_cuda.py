"""A stand-in for ``torch.cuda``, as far as the CUDA backend touches it: CPU tensors, a written record, torch's rules.

What it imitates was read in torch's sources: which state a failed ``capture_end`` leaves behind, when the allocator
asserts, when a pool's handle is dead. Work under capture is recorded operation by operation and run again by a replay,
on the same memory. Unlike CUDA it also runs during the capture. It shows order and clean-up, nothing of a GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from types import FunctionType, SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
ECHO = "CUDA error: operation failed due to a previous error during capture\nCompile with TORCH_USE_CUDA_DSA."
UNDERWAY = "captures_underway.empty() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"


def adds_one(x):
    return x + 1


def reads_a_scalar(x):
    return x * x.sum().item()


def capture(pool, model):
    return pool.capture(model, (torch.ones(2),), {}, batch_size=2)


class FakeCuda:
    """``failures`` maps a call's name to what its next calls raise (None: nothing).

    ``version`` is that of the imitated torch. 2.10 has a second allocator, for pinned memory, which cannot be told that
    a capture has failed. 2.13 tells both allocators but keeps the share in the pool. 2.14 returns that share too,
    and finds generators by itself.
    """

    def __init__(self, *, keeps_graphs=False, failures=None, version=(2, 11), allocator="native"):
        self.version, self.allocator = version, allocator
        self.host_underway = []
        self.current, self.touched = 0, []
        self.calls = []
        self.failures = dict(failures or {})
        self.underway = []
        self.shares = {}
        self.refused_into, self.is_pool_broken = set(), False
        self.generator_is_capturing = False
        self.capturing = None
        self.is_invalidated = False
        self.graphs = []
        self.stream_now = FakeStream(self, "caller")
        self._handles = itertools.count(1)
        self.CUDAGraph = type("CUDAGraph", (_KeptGraph if keeps_graphs else _Graph,), {"cuda": self})
        self.memory = SimpleNamespace(
            _cuda_endAllocateToPool=self._end_allocation, _cuda_releasePool=self._release_pool
        )

    def note(self, name, detail=""):
        self.calls.append(f"{name} {detail}".strip())
        planned = self.failures.get(name)
        error = planned.pop(0) if planned else None
        if error is not None:
            raise error

    def touch(self, what, device=None):
        """Take note of the GPU that a call concerns: the one it names, else the current one."""
        self.touched.append((what, self.current if device is None else device))

    def names(self):
        return [call.split()[0] for call in self.calls]

    def refuse(self):
        """What ``.item()`` and its like do while a stream captures."""
        if self.capturing is not None:
            self.is_invalidated = True
            raise RuntimeError(REFUSED)

    # The surface of torch.cuda, in its own names.

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def Stream(self, device=None):
        self.touch("Stream", device)
        return FakeStream(self, "side")

    def current_stream(self, device=None):
        self.touch("current_stream", device)
        return self.stream_now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        return _Capture(self, graph, pool, stream, capture_error_mode)

    def graph_pool_handle(self):
        return (0, next(self._handles))

    def synchronize(self, device=None):
        self.touch("synchronize", device)
        self.note("synchronize")

    def empty_cache(self):
        self.note("empty_cache")
        if self.underway:
            raise RuntimeError(UNDERWAY)
        if self.is_pool_broken:
            raise RuntimeError("it->second->use_count == 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")

    def set_stream(self, stream):
        self.stream_now = stream

    def memory_reserved(self, device=None):
        self.touch("memory_reserved", device)
        self.note("memory_reserved")
        return 1_000 + sum(size for graph in self.graphs for _, size in graph.memory)

    def memory_snapshot(self):
        if self.allocator != "native":
            raise RuntimeError(f"Calling snapshot with backend:{self.allocator} is not meaningful.")
        kept = [handle for handle in self.refused_into if self.shares[handle]]
        return [
            *({"address": 0, "total_size": 2 << 20, "segment_pool_id": handle} for handle in kept),
            *(
                {"address": address, "total_size": size, "segment_pool_id": graph.handle}
                for graph in self.graphs
                for address, size in graph.memory
            ),
        ]

    def get_rng_state(self, device=None):
        self.touch("get_rng_state", device)
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        self.touch("set_rng_state", device)
        self.note("set_rng_state", str(state.tolist()))

    def Event(self, enable_timing=False):
        return _Event(self, enable_timing)

    def _end_allocation(self, device, handle):
        self.touch("end_allocation", device)
        self.note("end_allocation")
        if handle not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(handle)

    def _release_pool(self, device, handle):
        self.touch("release_pool", device)
        self.note("release_pool")
        self.release(handle)

    def release(self, handle):
        self.shares[handle] -= 1
        if self.shares[handle] < 0:
            self.shares[handle], self.is_pool_broken = 0, True
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.note("wait_stream", f"{self.name} after {other.name}")


class _Capture:
    """As ``torch.cuda.graph``: when ``capture_end`` raises, the stream is not given back."""

    def __init__(self, cuda, graph, pool, stream, mode):
        self.cuda, self.graph, self.pool, self.mode = cuda, graph, pool, mode
        self.stream = cuda.stream(stream)

    def __enter__(self):
        self.cuda.synchronize()
        self.cuda.empty_cache()
        self.stream.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *exc_info):
        self.graph.capture_end()
        self.stream.__exit__(*exc_info)


class _Graph:
    cuda: FakeCuda

    def __init__(self):
        self.tape, self.memory, self.handle, self.generators = _Tape(self), [], None, []
        self.has_begun = self.has_ended = False

    def capture_begin(self, pool, mode):
        cuda = self.cuda
        cuda.touch("capture_begin")
        cuda.note("capture_begin", f"{cuda.stream_now.name} {mode}")
        if cuda.capturing is not None:
            raise RuntimeError(REFUSED)
        self.begun_on = cuda.stream_now
        self.handle = pool or cuda.graph_pool_handle()
        assert cuda.shares.get(self.handle, 1) > 0, "use_count > 0 INTERNAL ASSERT FAILED"
        cuda.shares[self.handle] = cuda.shares.get(self.handle, 0) + 1
        cuda.underway.append(self.handle)
        if cuda.version >= (2, 10):
            if self.handle in cuda.host_underway:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            cuda.host_underway.append(self.handle)
        self.has_begun = True
        cuda.capturing, cuda.is_invalidated, cuda.generator_is_capturing = self, False, True
        self.tape.__enter__()

    def capture_end(self):
        cuda = self.cuda
        self.tape.__exit__(None, None, None)
        if cuda.stream_now is not self.begun_on:  # torch leaves the stream capturing, for good
            raise RuntimeError("Capture must end on the same stream it began on.")
        cuda.capturing = None
        cuda.note("capture_end")
        if cuda.version >= (2, 13):
            self._tell_the_allocators()
        if cuda.is_invalidated:
            cuda.refused_into.add(self.handle)
            raise RuntimeError(ECHO)
        if cuda.version < (2, 13):
            self._tell_the_allocators()
        cuda.generator_is_capturing = False
        self.has_ended, self.memory = True, self.tape.memory()
        cuda.graphs.append(self)
        if not self.tape.steps:
            warnings.warn("The CUDA Graph is empty. This usually means (Triggered internally)", stacklevel=2)

    def _tell_the_allocators(self):
        self.cuda.underway.remove(self.handle)
        if self.cuda.version >= (2, 10):
            self.cuda.host_underway.remove(self.handle)

    def register_generator_state(self, generator):
        self.cuda.note("register_generator")
        self.generators.append(generator)

    def pool(self):
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.handle

    def replay(self):
        self.cuda.note("replay")
        self.tape.run()

    def reset(self):
        self.cuda.note("reset")
        if self.has_ended:
            self.has_ended = self.has_begun = False
            self.cuda.release(self.handle)
            self.cuda.graphs.remove(self)
        elif self.has_begun and self.cuda.version >= (2, 14):
            self.has_begun = False
            self.cuda.release(self.handle)


class _KeptGraph(_Graph):
    """A graph of torch 2.8 and later, which can be kept and looked into."""

    def __init__(self, keep_graph=False):
        super().__init__()
        self.cuda.note("new_graph", "kept" if keep_graph else "")

    def instantiate(self):
        self.cuda.note("instantiate")

    def raw_cuda_graph(self):
        return id(self)


class FakeTreeManager:
    """As torch's own: compiled code with graphs holds ``run`` of one shared manager."""

    def run(self, inputs, function_id):
        return self._run(inputs, function_id)

    def _run(self, inputs, function_id):
        return inputs + 1


class _Event:
    def __init__(self, cuda, enable_timing):
        assert enable_timing
        self.cuda = cuda
        cuda.touch("Event")

    def record(self):
        self.cuda.note("record")

    def synchronize(self):
        self.cuda.note("event_synchronize")

    def elapsed_time(self, end):
        return 0.25


class _Tape(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.cuda, self.steps = graph, graph.cuda, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._refuse_unknown_generator((kwargs or {}).get("generator"))
        if func.overloadpacket in (torch.ops.aten.item, torch.ops.aten._local_scalar_dense):
            self.cuda.refuse()
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result

    def _refuse_unknown_generator(self, generator):
        known = (torch.default_generator, *self.graph.generators)
        if generator is None or self.cuda.version >= (2, 14):
            return
        if generator._cdata not in [each._cdata for each in known]:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def memory(self):
        """Address and size of every storage made while recording, which the tape keeps alive."""
        found, known = {}, set()
        for _, args, kwargs, result in self.steps:
            known |= {_address(tensor) for tensor in _tensors((args, kwargs))} - found.keys()
            made = [tensor for tensor in _tensors(result) if _address(tensor) not in known]
            found |= {_address(tensor): tensor.untyped_storage().nbytes() for tensor in made}
        return list(found.items())

    def run(self):
        with torch.inference_mode():
            for func, args, kwargs, result in self.steps:
                for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(result), strict=True):
                    if _address(new) != _address(old):
                        old.copy_(new)


def _without_frames(kind):
    """Torch's part is C++, which has no Python frames: no line of the fake may count as a user's."""
    for value in vars(kind).values():
        function = inspect.unwrap(value) if callable(value) else None
        if isinstance(function, FunctionType):
            function.__code__ = function.__code__.replace(co_filename="<torch.cuda>")


for _kind in (FakeCuda, FakeStream, _Capture, _Graph, _KeptGraph, FakeTreeManager, _Event, _Tape):
    _without_frames(_kind)


def _tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor):
    return tensor.untyped_storage().data_ptr()

"""The CPU twin: CUDA graphs' rules on real CPU values.

A capture records one call's operations by the addresses they work on and executes nothing; a replay runs them again
as a flat list, without any Python of the model. Its times are CPU times and say nothing of a GPU.

::

    backend    CpuBackend and its pool: warm up, record, hand out graphs
    recording  one recorded call, after which everything is as before
    recorder   the dispatch mode that sees every operation of one call
    guards     what the dispatcher cannot see, and what a capturing process answers
    refusals   the first reason why the capture cannot be
    tape       operations to steps: what a replay must run again, and what it need not
    lowering   one operation to one callable that writes into its fixed buffers
    bindings   the fastest Python door to one operator
    traits     what a schema says of one operator
    storages   who made which memory; undo of writes, poison
    outside    memory of others, known by its address and not kept alive
    witness    what was there before the recorded call
    intake     the static inputs, with a short way for plain tensors
    trial      composite operators by their parts
    results    results in memory of their own, or aliases
    region     compiled code, one opaque step
    graph      the replayable result, and its turn among its siblings
    trap       no Python of the model in a replay
"""

from pytest_cudagraph.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

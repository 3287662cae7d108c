"""The CPU twin: the rules of CUDA graphs, with real values on a CPU.

A capture records the operations of one call and the addresses they work on. A replay runs these operations again as a
flat list, without Python code of the model. Its times are CPU times and say nothing about a GPU.

::

    backend    CpuBackend and its pool: warm up, record, make a graph
    recording  records one call, then restores state, random numbers and torch's functions
    tape       turns the operations into the steps of a replay
    lowering   turns one operation into one callable that writes into fixed buffers
    operators  the properties of an operator, and the fastest Python binding that calls it
    memory     the storages that a recording makes, changes and reads
    graph      the replayable result
"""

from pytest_cudagraph.backends.cpu.backend import CpuBackend

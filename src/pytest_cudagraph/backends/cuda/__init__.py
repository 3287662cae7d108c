"""CUDA graphs of torch, on one GPU.

Written from torch's sources (2.6 to 2.13), and tested with a fake of ``torch.cuda``: **no GPU has run this code yet**.

::

    backend     CudaBackend, event timer, counted compiled code
    pool        a captured graph, and the graphs of one model in their shared memory
    recording   one capture, and the recovery after a failed one
    refusals    turns errors of torch and CUDA into refusals with a hazard and a line
    gpu         the capture stream and the lock of captures
    nodes       counts the nodes of a graph
    generators  finds the random generators of a model
"""

from pytest_cudagraph.backends.cuda.backend import CudaBackend

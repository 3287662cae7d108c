"""CUDA graphs of torch, on one GPU.

Written from torch's sources (2.6 to 2.13) and driven by a fake in its unit tests: **no GPU has run this code yet**.
What only a GPU can show, such as the recovery after a refused capture, is told apart where it stands.
"""

from pytest_cudagraph.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]

"""The compile stage: the model as it is, under ``torch.compile``, or as an AOTInductor package, per batch size."""

from pytest_cudagraph.compile.compile_batches import Compiled, compile_model

"""Eager against graphs: one engine, one process per mode. The interface of an engine, and the adapter for vLLM.

Nothing here imports torch. The process of a mode is :mod:`pytest_cudagraph.engine_modes.mode_process`.
"""

from pytest_cudagraph.engine_modes.mode_request import ModeRequest, read_request, write_request
from pytest_cudagraph.engine_modes.protocol import Engine, EngineFacts, LoadedEngine, LoadRequest
from pytest_cudagraph.engine_modes.vllm_engine import VllmEngine, vllm

"""The run of one model, stage by stage. It does not know pytest."""

from pytest_cudagraph.pipeline.device_context import DeviceContext, open_device_context
from pytest_cudagraph.pipeline.model_run import ModelRun, run_stages
from pytest_cudagraph.pipeline.prepared_model import nothing_judged, prepare_model, run_once
from pytest_cudagraph.pipeline.stage_objects import CompiledModel, Graphs

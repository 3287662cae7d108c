"""The state of a model between two calls: save it, compare it bit by bit, restore it."""

from pytest_cudagraph.state.constants import NO_CONSTANTS, Constants
from pytest_cudagraph.state.size_states import SizeStates
from pytest_cudagraph.state.snapshot import Changes, Snapshot, Undo, live
from pytest_cudagraph.state.storages import is_addressable, layout_of
from pytest_cudagraph.state.walk import modules_of

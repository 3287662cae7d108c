"""The state of a model between two calls: save it, compare it bit by bit, restore it."""

from pytest_cudagraph.state.snapshot import NO_CONSTANTS, Changes, Constants, Snapshot, live
from pytest_cudagraph.state.storages import is_addressable, layout_of
from pytest_cudagraph.state.undo import SizeStates, Undo
from pytest_cudagraph.state.walk import modules_of

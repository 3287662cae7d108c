"""The graphs that a program captures itself: what they hold, how often they replay, and what goes wrong around them."""

from pytest_cudagraph.own_graphs.ledger import GraphLedger, GraphRecord, MemoryUse, WatchedCall
from pytest_cudagraph.own_graphs.watch import graph_watch

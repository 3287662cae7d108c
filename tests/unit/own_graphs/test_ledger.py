"""The ledger of a program's graphs as text and as figures. Filling it needs a CUDA device: see tests/gpu."""

from __future__ import annotations

from collections import Counter

from pytest_cudagraph.own_graphs.ledger import GraphLedger, GraphRecord, MemoryUse, WatchedCall
from pytest_cudagraph.values import Site

CAPTURE = Site(file="serve.py", line=20, function="capture")
FORWARD = Site(file="model.py", line=7, function="forward")


def weight(key=1):
    return {key: MemoryUse(size_bytes=4096, operator="addmm", site=FORWARD, is_parameter=True)}


def record(ledger, *, rows=2, **facts):
    facts = {"site": CAPTURE, "memory": weight(), "operators": [("addmm", ((rows, 8),))], **facts}
    ledger.graphs.append(GraphRecord(ledger=ledger, number=len(ledger.graphs), **facts))
    return ledger.graphs[-1]


def test_a_ledger_as_text_names_every_graph_and_every_trouble(golden):
    ledger = GraphLedger(unknown_replays=3)
    record(ledger, replays=340, pool_bytes=2 << 20)
    record(ledger, rows=4, replays=1, nodes=14, is_closed=True)
    record(ledger, replays=5)
    record(ledger, rows=8, failure="operation not permitted when stream is capturing")
    gone = MemoryUse(size_bytes=192, operator="addmm", site=FORWARD, is_freed=True)
    record(ledger, rows=16, memory={9: gone}, replays=7, freed_replays=2)
    ledger.calls += [
        WatchedCall(label="1 request", replays=2),
        WatchedCall(label="batch of 32", eager=Counter(addmm=3, relu=1), sites={"addmm": FORWARD, "relu": FORWARD}),
    ]
    golden("own_graphs/ledger.txt", "\n".join(ledger.lines()))


def test_an_empty_ledger_is_one_line():
    assert GraphLedger().lines() == ["0 captures, 0 replays"]


def test_captures_of_other_shapes_weights_or_lines_are_no_recaptures():
    ledger = GraphLedger()
    record(ledger)
    record(ledger, rows=4)
    record(ledger, memory=weight(2))
    record(ledger, site=FORWARD)
    assert ledger.recaptures == []


def test_a_refused_capture_is_no_recapture_and_is_not_counted():
    ledger = GraphLedger()
    record(ledger, failure="refused")
    record(ledger)
    assert (ledger.captures, ledger.recaptures) == (1, [])


def test_the_kind_of_a_call_is_what_it_launched():
    kinds = [
        WatchedCall(label="a", captures=1, replays=1).kind,
        WatchedCall(label="b", replays=1).kind,
        WatchedCall(label="c", replays=1, eager=Counter(mul=1)).kind,
        WatchedCall(label="d", eager=Counter(mul=1)).kind,
        WatchedCall(label="e").kind,
    ]
    assert kinds == ["capture", "replay", "replay and eager", "eager", "nothing"]

"""What a proof finds: each trouble is one finding, with its cause, its line and its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_cudagraph.errors import first_line
from pytest_cudagraph.own_graphs.ledger import GraphLedger, GraphRecord, WatchedCall
from pytest_cudagraph.sources import user_site_of
from pytest_cudagraph.units import bytes_text, plural
from pytest_cudagraph.values import Finding, Site


class Trouble(Exception):
    """The first thing that a proof found. It ends the proof."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def _trouble(
    hazard: str, message: str, site: Site | None, fix: str, evidence: Sequence[str] = (), *, loud: bool = False
) -> Trouble:
    return Trouble(
        Finding(id=hazard, level="error", message=message, fix=fix, evidence="; ".join(evidence), site=site, loud=loud)
    )


def wrong(label: str, words: str, evidence: Sequence[str] = ()) -> Trouble:
    """Another result than eager's, of no cause that is known more closely."""
    return _trouble("wrong", f"{label}: {words}", None, "look at what the runner writes before the replay", evidence)


def raises(error: Exception) -> Trouble:
    """A runner that raises where eager does not."""
    site = user_site_of(error)
    return _trouble(
        "raises", f"the runner raised {first_line(error)}; eager does not", site, "mend the runner", loud=True
    )


def unused_argument(name: str, trouble: Trouble) -> Trouble:
    """An argument that the graph never reads."""
    message = f"{name} changes what eager computes, and not what the runner computes"
    return _trouble("unused-argument", message, None, f"copy {name} into the static input before each replay",
                    (trouble.finding.message,))  # fmt: skip


def stale_weights(label: str, trouble: Trouble) -> Trouble:
    """Weights that the graph does not read where they are now."""
    message = f"{label}: the graph computes with other weights than eager"
    fix = "write weights in place, or capture again after they moved"
    return _trouble("stale-weights", message, None, fix, (trouble.finding.message,))


def baked_scalar(label: str, trouble: Trouble) -> Trouble:
    """A number of the host that the graph keeps as it was at the capture."""
    message = f"{label}: the graph computes with a number or an object of the host as it was at the capture"
    return _trouble("baked-scalar", message, None, "keep it in a tensor on the device, and write it in place",
                    (trouble.finding.message,))  # fmt: skip


def dead_memory(graph: GraphRecord) -> Trouble:
    """A replay that uses memory which nobody owns."""
    use = graph.freed[0]
    message = (
        f"graph {graph.number} was replayed after {bytes_text(use.size_bytes)} that it uses were freed: {use.operator}"
    )
    return _trouble("dead-memory", message, use.site, "keep the tensor as long as the graph", (graph.line(),))


def overwritten_output(earlier: str, later: str) -> Trouble:
    """An output that is memory of the graph."""
    message = f"the output of {earlier} is overwritten by {later}: it is memory of a graph"
    return _trouble("overwritten-output", message, None, "return a clone, or say outputs='borrowed'")


def recaptures(graphs: Sequence[GraphRecord], calls: int) -> Trouble:
    """Captures where every size was called before."""
    message = f"{plural(len(graphs), 'capture')} in {plural(calls, 'call')} of sizes that were all called before"
    return _trouble(
        "recaptures", message, graphs[0].site, "keep a graph for each size, and look at the key of the cache"
    )


def eager_fallback(calls: Sequence[WatchedCall], total: int) -> Trouble:
    """Calls that used no graph."""
    operator, site = next(iter(calls[0].sites.items()))
    message = f"{len(calls)} of {plural(total, 'call')} ran without a graph, first {calls[0].label}: {operator}"
    return _trouble("eager-fallback", message, site, "capture this size, or pad it to a captured one")


def memory_growth(grown_bytes: int, calls: int, allowed_bytes: int) -> Trouble:
    """More memory after calls that were all made before."""
    grown, allowed = bytes_text(grown_bytes), bytes_text(allowed_bytes)
    message = f"{grown} more are reserved after {plural(calls, 'call')}; allowed is {allowed}"
    return _trouble("memory-growth", message, None, "release what a call keeps: graph.reset(), outputs, lists")


def no_graph(watch: GraphLedger) -> Trouble:
    """A runner that captures nothing."""
    if watch.refused:
        graph = watch.refused[0]
        fix = "run the model through cudagraph(model, ...): its audit names the operator"
        return _trouble("not-captured", f"each capture was refused: {graph.failure}", graph.site, fix, loud=True)
    message = "the runner captured no graph"
    if watch.unknown_replays:
        message = "the runner replays graphs that were captured before the watch"
        return _trouble(
            "no-graph", message, None, "give a function that makes the runner: cudagraph.own(make_runner, ...)"
        )
    return _trouble("no-graph", message, None, "look at the condition under which it captures", watch.lines())

"""Record the calls of serving code in a test: tokens per second, failures, and that every step used its graph."""

import torch
from torch import nn

from pytest_cudagraph import GraphRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USERS, STEPS = 4, 50


def test_decoding_is_served_by_graphs(perf_monitor):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval().to(DEVICE)
    hidden = torch.randn(USERS, 64, device=DEVICE)

    @perf_monitor.watch("request", tokens=lambda steps: USERS * steps, batch_size=USERS)
    def serve(run):
        state = hidden
        for _ in range(STEPS):
            with perf_monitor.measure("step", tokens=USERS, batch_size=USERS):
                state = run(state)
        return STEPS

    with GraphRunner(model, hidden, batch_sizes=(1, 2, 4), device=DEVICE) as run:
        serve(run)

    for summary in perf_monitor.summary().values():
        print("\n".join(summary.lines()))
    # Limits of time are those of one machine; the graph hit ratio holds on any.
    perf_monitor.expect("step", min_graph_hit_ratio=1.0, max_failures=0, min_calls=STEPS)
    perf_monitor.expect("request", min_tokens_per_s=10)

"""``cudagraph.own`` in a pytest of its own: a right runner has a row and a table, a wrong one fails by its cause."""

from __future__ import annotations

RUNNER = """
class Runner:
    keeps = True

    def __init__(self, model):
        self.model, self.graphs = model, {}
        with torch.no_grad():
            for size in (4, 2, 1):
                x = torch.zeros(size, 16, device="cuda")
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    model(x)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = model(x)
                self.graphs[size] = graph, x, y

    def __call__(self, rows):
        graph, x, y = self.graphs[next(size for size in (1, 2, 4) if size >= len(rows))]
        x[:len(rows)].copy_(rows)
        graph.replay()
        return y[:len(rows)].clone() if self.keeps else y[:len(rows)]

class HandsOutItsBuffer(Runner):
    keeps = False

model = Mlp().cuda().eval()
"""

CALL = "cudagraph.own(lambda: {}(model), torch.randn(4, 16, device='cuda'), eager=model, batch_sizes=[1, 3, 4])"


def body(runner):
    return f"{RUNNER}\n{CALL.format(runner)}"


def test_a_right_runner_passes_and_its_graphs_are_in_a_table(project):
    options = ("--cudagraph-json=run.json", "--cudagraph-min-speedup=0.01", "--cudagraph-time-budget=0.3")
    result = project(body("Runner"), *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["own graphs*", "test * batch  calls  graphs  captures  replays *pool"])
    batches = project.document["tests"][0]["batches"]
    assert [batch["batch_size"] for batch in batches] == [1, 3, 4]
    assert {batch["scenario"]["result"]["captures"] for batch in batches} == {3}
    assert all(batch["replay"] and batch["speedup"] for batch in batches)


def test_a_wrong_runner_fails_by_its_cause_with_the_ledger_as_evidence(project):
    result = project(body("HandsOutItsBuffer"), "--cudagraph-json=run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*OwnGraphsFailed: *is overwritten by*[[]overwritten-output]*",
            "E*graph 0 at test_*: * replay*",
            "E*fix: return a clone, or say outputs='borrowed'",
        ]
    )
    assert {batch["verdict"] for batch in project.document["tests"][0]["batches"]} == {"wrong"}

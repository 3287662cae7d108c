"""Serve a model from four threads through captured graphs: CUDA graphs on a GPU, the CPU twin elsewhere.

Every answer is compared with eager. Prints what was served, and how; the exit status is 0 when all answers agree.
"""

import sys
import threading

import torch
from torch import nn

from pytest_cudagraph import GraphRunner

THREADS = 4
REQUESTS = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Ranker(nn.Module):
    """Scores documents against a query; ``temperature`` is a plain number, ``mask`` a keyword."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.score = nn.Linear(width, 16)

    def forward(self, features, temperature, *, mask):
        hidden = self.layers(features)
        return {"scores": (self.score(hidden) / temperature).masked_fill(mask, -1e4), "hidden": hidden}


def make_call(rows, source):
    features = torch.randn(rows, 64, generator=source).to(DEVICE)
    mask = (torch.rand(rows, 16, generator=source) < 0.2).to(DEVICE)
    return (features, 0.7), {"mask": mask}


def serve(run, model, number, start, wrong):
    source = torch.Generator().manual_seed(number)
    start.wait()
    for _ in range(REQUESTS):
        rows = int(torch.randint(1, 11, (1,), generator=source))  # 9 and 10 are beyond the largest graph
        args, kwargs = make_call(rows, source)
        answer = run(*args, **kwargs)
        with torch.inference_mode():
            expected = model(*args, **kwargs)
        try:
            # Another number of rows may choose another kernel, which rounds differently: close, not equal.
            torch.testing.assert_close(answer, expected)
        except AssertionError as error:
            wrong.append(f"thread {number}, {rows} rows: {error}")


def main():
    torch.manual_seed(0)
    model = Ranker().eval().to(DEVICE)
    args, kwargs = make_call(1, torch.Generator().manual_seed(0))
    start, wrong = threading.Barrier(THREADS), []
    with GraphRunner(model, *args, kwargs=kwargs, batch_sizes=(1, 2, 4, 8), device=DEVICE) as run:
        threads = [threading.Thread(target=serve, args=(run, model, number, start, wrong)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("\n".join(run.statistics.lines()))
        served = run.statistics.calls
    print("\n".join(wrong) or f"all {served} answers agree with eager")
    return int(bool(wrong) or served != THREADS * REQUESTS)


if __name__ == "__main__":
    sys.exit(main())

"""A pipeline that compiles its models ahead of time, as it would with any compiler, and then just calls them.

``python examples/drop_in_compiler.py [MODE]``: ``default`` compiles with Inductor, ``aot`` makes packages, ``none``
captures the models as they are. One model is served by graphs; the other one reads a value on the host, which no graph
can do, and runs as it is. Every answer is compared with eager; the exit status is 0 when all agree.
"""

import logging
import sys

import torch
from torch import nn

from pytest_cudagraph import create_integrated_compiler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, 3, 8, 2, 9, 4)  # 3 is padded to 4, 9 is beyond the largest graph


class Scorer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))

    def forward(self, features):
        return self.layers(features)


class Adaptive(Scorer):
    """Scales by a value that it reads on the host."""

    def forward(self, features):
        return super().forward(features) * (1.0 if features.abs().max().item() < 100 else 0.01)


class Pipeline:
    """Knows nothing of graphs: it hands a model in, and uses what it gets in the model's place."""

    def __init__(self, compiler, mode):
        self.compiler, self.mode, self.models = compiler, mode, {}

    def load(self, name, model, example_inputs):
        model = model.eval().to(DEVICE)
        self.models[name] = self.compiler.compile_model_aot(model, example_inputs, {"model_name": name}, self.mode)

    def evaluate(self, name, features):
        return self.models[name](features)


def wrong_answers(pipeline, originals):
    for rows in ROWS:
        features = torch.randn(rows, 64, device=DEVICE)
        for name, model in originals.items():
            with torch.inference_mode():
                expected = model(features)
            try:
                # Padding and compiled code may choose other kernels, which round differently: close, not equal.
                torch.testing.assert_close(pipeline.evaluate(name, features), expected)
            except AssertionError as error:
                yield f"{name}, {rows} rows: {error}"


def main(mode="default"):
    logging.basicConfig(format="logged once: %(message)s")
    torch.manual_seed(0)
    originals = {"scorer": Scorer(), "adaptive": Adaptive()}
    with create_integrated_compiler(batch_sizes=(1, 2, 4, 8)) as compiler:
        pipeline = Pipeline(compiler, mode)
        for name, model in originals.items():
            pipeline.load(name, model, (torch.randn(2, 64, device=DEVICE),))
        wrong = list(wrong_answers(pipeline, originals))
        statistics = compiler.statistics()
    print("\n".join(statistics.lines()))
    print("\n".join(wrong) or f"all {statistics.calls} answers agree with eager")
    return int(bool(wrong) or statistics.calls != len(ROWS) * len(originals))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))

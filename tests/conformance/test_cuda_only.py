"""Rows of the catalogue that need a CUDA device: pinned memory and other streams inside the call."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.cases import WRONG, Base, Case, Expected
from tests.conformance.stages import is_marked, run
from torch import nn

from pytest_cudagraph.backends import open_backend

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


class PinnedInside(Base):
    def forward(self, x):
        scale = torch.full((4,), 2.0, device="cpu").pin_memory()  # HERE
        return x * scale.to(x.device, non_blocking=True)


class OnTheDefaultStream(Base):
    def forward(self, x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            doubled = x * 2
        return self.linear(x) + doubled


class OnASideStream(Base):
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()

    def forward(self, x):
        with torch.cuda.stream(self.side):
            doubled = x * 2  # HERE
        return self.linear(x) + doubled


class LeftUnjoined(OnASideStream):
    def forward(self, x):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            doubled = x * 2  # HERE
        return self.linear(x) + doubled


class Joined(OnASideStream):
    def forward(self, x):
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            doubled = x * 2
        here.wait_stream(self.side)
        return self.linear(x) + doubled


class GraphedCallable(Base):
    def __init__(self):
        super().__init__()
        self.graphed = torch.cuda.make_graphed_callables(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))

    def forward(self, x):
        return self.graphed(x[:2]) * 2  # HERE


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param(PinnedInside, {"audit": "host-sync"}, id="row 11, pinned memory"),
        pytest.param(OnTheDefaultStream, {"check": WRONG}, id="row 13, the default stream"),
        pytest.param(OnASideStream, {"capture": "unknown-op"}, id="row 14, a side stream that never waits"),
        pytest.param(LeftUnjoined, {"capture": "unknown-op"}, id="row 14, a side stream that is not joined"),
        pytest.param(GraphedCallable, {"audit": "nested-graph"}, id="row 24, a graph inside"),
        pytest.param(Joined, {}, id="row 14, a side stream that is joined"),
    ],
)
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_a_hazard_of_the_device_is_found_at_its_line(model, said, kind):
    case = Case(
        name=model.__name__,
        build=lambda: (model().eval(), (torch.randn(2, 4),), {}),
        expected=Expected(),
        source=model.forward,
    )
    found = run(case, open_backend(kind))
    assert {stage: word for stage, word in found.words.items() if word} == said
    assert all(is_marked(error.site) for error in found.audit.errors)
    assert found.refusal is None or is_marked(found.refusal.site)

"""Graph networks, normalizing flows and differential equations."""

from __future__ import annotations

import torch
from tests.conformance.libraries.declared import ROWS, model_of
from torch import nn

# torch-geometric

NODES = 6
EDGES = [[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]]
ONE_GRAPH = {"batch_dim": None, "sizes": (1,)}


def of_nodes(name, **sizes):
    import torch_geometric.nn

    return getattr(torch_geometric.nn, name)(8, 8, 2, 4, **sizes), (torch.randn(NODES, 8), torch.tensor(EDGES)), {}


for name in ("EdgeCNN", "GIN", "GraphSAGE"):
    model_of("torch_geometric", name, **ONE_GRAPH)(lambda name=name: of_nodes(name))


@model_of("torch_geometric", **ONE_GRAPH)
def pna():
    return of_nodes("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 4, 2]))


for name in ("GAT", "GCN"):
    model_of(
        "torch_geometric", name, verdict="audit: dynamic-shape", line="edge_index = edge_index[:, mask]", **ONE_GRAPH
    )(lambda name=name: of_nodes(name))


@model_of("torch_geometric", verdict="audit: host-data", line="adj[:, idx, idx] = 1")
def dense_gcn():
    """The number that it writes at places given by tensors is copied from the host."""
    from torch_geometric.nn import DenseGCNConv

    return DenseGCNConv(8, 8), (torch.randn(ROWS, NODES, 8), (torch.rand(ROWS, NODES, NODES) > 0.5).float()), {}


# nflows and zuko


class LogProbability(nn.Module):
    """A flow of nflows is a distribution, one of zuko makes one."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        return (self.flow if hasattr(self.flow, "log_prob") else self.flow()).log_prob(x)


def points():
    return torch.randn(ROWS, 4)


@model_of("nflows")
def masked_autoregressive_flow():
    from nflows.flows import MaskedAutoregressiveFlow

    return LogProbability(MaskedAutoregressiveFlow(4, 8, 1, 1)), (points(),), {}


@model_of("nflows")
def real_nvp():
    from nflows.flows import SimpleRealNVP

    return LogProbability(SimpleRealNVP(4, 8, 2, 1)), (points(),), {}


@model_of("nflows", verdict="audit: dynamic-shape+host-sync", line="inputs[outside_interval_mask]")
def rational_splines():
    from nflows.nn.nets import ResidualNet
    from nflows.transforms import PiecewiseRationalQuadraticCouplingTransform

    mask = torch.tensor([1, 0, 1, 0])
    flow = PiecewiseRationalQuadraticCouplingTransform(
        mask, lambda width, outputs: ResidualNet(width, outputs, 8), tails="linear", tail_bound=3.0
    )
    return flow, (points(),), {}


@model_of("zuko")
def neural_splines():
    from zuko.flows import NSF

    return LogProbability(NSF(4, transforms=1)), (points(),), {}


@model_of("zuko", verdict="audit: dynamic-shape", line="mask.nonzero()")
def couplings():
    from zuko.flows import RealNVP

    return LogProbability(RealNVP(4, transforms=2)), (points(),), {}


# torchdiffeq


class Solution(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.linear, self.method = nn.Linear(4, 4), method
        self.register_buffer("times", torch.tensor([0.0, 1.0]))

    def forward(self, start):
        from torchdiffeq import odeint

        return odeint(lambda time, y: self.linear(y).tanh(), start, self.times, method=self.method)[-1]


@model_of("torchdiffeq", verdict="audit: host-sync", line="assert diff.all()")
def euler():
    return Solution("euler"), (points(),), {}


@model_of("torchdiffeq", verdict="audit: host-sync+host-data+dynamic-shape", line="assert diff.all()")
def adaptive_steps():
    return Solution("dopri5"), (points(),), {}

"""A model that was left in training mode: legal, and seldom meant where graphs are served."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pytest_cudagraph import state
from pytest_cudagraph.protocols import Model
from pytest_cudagraph.units import plural
from pytest_cudagraph.values import Finding


def training_note(model: Model, findings: Iterable[Finding]) -> str:
    """What training mode does in this model, in words; empty where nothing is in it, or it makes no difference seen."""
    modules = [each for outer in state.modules_of(model) for each in outer.modules() if each.training]
    effects = list(dict.fromkeys(effect for module in modules for effect in _effects(module)))
    if modules and not effects and any(finding.id == "rng" for finding in findings):
        effects = ["it draws random numbers"]
    if not effects:
        return ""
    count = plural(len(modules), "module")
    return f"the model is in training mode ({count}): {', '.join(effects)}; call .eval() if that is not meant"


def _effects(module: nn.Module) -> list[str]:
    name = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return [f"{name} draws random numbers"]
    if isinstance(module, nn.modules.batchnorm._NormBase) and isinstance(module.running_mean, torch.Tensor):
        return [f"{name} updates its statistics"]
    return []

"""Where the tensors of a call would lie on CUDA, told from their origin by the source text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import arange

from pytest_cudagraph.audit.observer import RuleWatch, observing
from pytest_cudagraph.backends.capture_mode import storage_key
from pytest_cudagraph.backends.placement import Placement

X, KEPT = torch.ones(4), torch.ones(4)
OPTIONS = {"device": X.device}


def made_with(device=None):
    return torch.zeros(4, device=device)


def made_by_default(size, device="cpu"):
    return torch.zeros(size, device=device)


def under_a_default_device():
    with torch.device("cpu"):
        return torch.zeros(4)


PLACES = {
    "a factory": (lambda: torch.zeros(4), "host"),
    "an imported factory": (lambda: arange(4), "host"),
    "no device passed on": (lambda: made_with(), "host"),
    "a device passed on": (lambda: made_with(X.device), "unknown"),
    "a default that is the host": (lambda: made_by_default(4), "host"),
    "such a default, not used": (
        lambda: made_by_default(4, device="cpu" if X.device.type == "cpu" else X.device),
        "unknown",
    ),
    "such a default, replaced by position": (lambda: made_by_default(4, X.device), "unknown"),
    "the host by name": (lambda: torch.zeros(4, device=torch.device("cpu")), "host"),
    "options": (lambda: torch.zeros(4, **OPTIONS), "unknown"),
    "a default device": (under_a_default_device, "unknown"),
    "data of Python": (lambda: torch.tensor([1.0]), "host"),
    "data of Python on a device": (lambda: torch.tensor([1.0], device=X.device), "unknown"),
    "an array": (lambda: torch.from_numpy(np.ones(4)), "host"),
    "from host tensors": (lambda: torch.arange(4)[None] * 2 + torch.ones(4), "host"),
    "the input": (lambda: X, "device"),
    "from the input": (lambda: X * 2, "device"),
    "from the input and a number": (lambda: torch.tensor(2.0) * X, "device"),
    "like the input": (lambda: X.new_zeros(2), "device"),
    "a plain attribute": (lambda: KEPT, "kept"),
    "from a plain attribute": (lambda: KEPT[0] * torch.tensor(2.0), "kept"),
    "two factories on one line": (lambda: (torch.zeros(4, device=X.device), torch.ones(4))[1], "host"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_tensor_follows_from_its_origin(name):
    make, place = PLACES[name]
    placement = Placement([storage_key(X)], kept=[storage_key(KEPT)])
    with torch.inference_mode(), observing(RuleWatch(placement).run):
        tensor = make()
    assert placement.place_of(tensor) == place


def test_memory_that_is_used_again_gets_the_place_of_its_new_tensor():
    placement = Placement([storage_key(X)])
    with torch.inference_mode(), observing(RuleWatch(placement).run):
        for _ in range(20):
            assert placement.place_of(X * 2) == "device"
            assert placement.place_of(torch.zeros(4)) == "host"
            assert placement.place_of(made_with(X.device)) == "unknown"

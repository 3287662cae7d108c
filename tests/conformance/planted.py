"""Four bugs to plant in any model."""

from __future__ import annotations

import torch
from tests.conformance.cases import Case, Expected
from tests.conformance.stages import is_marked
from torch import nn

from pytest_cudagraph import pytree


class Bug(nn.Module):
    """A model with something wrong behind it: a bug that any model may have grown."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def answer(self, args, kwargs):
        return pytree.tensors_in(self.model(*args, **kwargs))[0]

    def after_capture(self):
        """What happens between capture and check."""


class BakedStep(Bug):
    steps = 0

    def forward(self, *args, **kwargs):
        self.steps += 1
        return self.answer(args, kwargs) * self.steps  # HERE


class BranchOnAnswer(Bug):
    def forward(self, *args, **kwargs):
        answer = self.answer(args, kwargs)
        if answer.sum() > 0:  # HERE
            return answer * 2  # HERE
        return answer


class WeightsReplaced(Bug):
    def forward(self, *args, **kwargs):
        return self.answer(args, kwargs)

    def after_capture(self):
        for parameter in self.parameters():
            parameter.data = parameter.data * 1.5


class GrowingCache(Bug):
    kept = None

    def forward(self, *args, **kwargs):
        answer = self.answer(args, kwargs)
        self.kept = answer * 1 if self.kept is None else torch.cat([self.kept, answer])  # HERE
        return answer + self.kept.sum()


PLANTED = {
    BakedStep: "audit: baked-scalar",
    BranchOnAnswer: "audit: host-sync",
    WeightsReplaced: "check: rebinds-state",
    GrowingCache: "audit: rebinds-state",
}
"""Each bug, and what the product must say of it."""


def planted(name, build, bug=None):
    """A case of what ``build`` makes (model, args, kwargs): as it is, or with a bug behind it."""

    def build_with_bug():
        model, args, kwargs = build()
        return (bug(model) if bug else model), args, kwargs

    after = bug.after_capture if bug else lambda model: None
    return Case(name=name, build=build_with_bug, expected=Expected(), after_capture=after)


def assert_clean(found):
    assert found.eager == ""
    assert found.audit.errors == ()
    assert found.warnings == frozenset()
    assert found.refusal is None
    assert found.disagreement is None


def assert_caught(found, bug):
    # A branch on a value that does go both ways within the few calls of the audit is seen to do so as well.
    assert found.verdict.removesuffix("+control-flow") == PLANTED[bug]
    assert all(is_marked(error.site) for error in found.audit.errors)

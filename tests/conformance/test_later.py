"""Values that move now and decide later: each hazard fails or is told, and no look-alike fails."""

from __future__ import annotations

import warnings

import pytest
from tests.conformance.later import LATER
from tests.conformance.models import later_alike, later_alike_forms, later_forms, later_hidden, later_places
from tests.conformance.stages import run

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.check import later_calls

MODULES = (later_alike, later_alike_forms, later_forms, later_hidden, later_places)
HAZARDS = {name: later for name, later in LATER.items() if later.is_hazard}
LOOK_ALIKES = {name: later for name, later in LATER.items() if not later.is_hazard}


@pytest.fixture(autouse=True)
def _time_for_every_call(monkeypatch):
    """On a slow machine too."""
    monkeypatch.setattr(later_calls, "_SOAK_S", 60)
    monkeypatch.setattr(later_calls, "_STILL_S", 60)


def seen_of(later, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(later.case, open_backend(kind))


@pytest.mark.parametrize("name", [name for name, later in HAZARDS.items() if later.seen == "wrong"])
def test_a_value_that_decides_later_fails_now(name, kind):
    assert any(seen_of(HAZARDS[name], kind).words.values())


@pytest.mark.parametrize("name", [name for name, later in HAZARDS.items() if later.seen == "told"])
def test_a_value_that_cannot_be_set_forward_is_told(name, kind):
    seen = seen_of(HAZARDS[name], kind)
    assert seen.not_judged or seen.warnings


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_value_that_decides_nothing_passes(name, kind):
    assert not any(seen_of(LOOK_ALIKES[name], kind).words.values())


def test_there_are_as_many_models_as_were_promised():
    assert len(HAZARDS) >= 60
    assert len(LOOK_ALIKES) >= 40
    assert {later.case.source.__module__ for later in LATER.values()} == {module.__name__ for module in MODULES}

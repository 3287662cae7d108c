"""Real models of other libraries: what the product says of each, and that a runner answers as eager does.

``python -m tox run -e nightly`` installs the libraries. A model of a missing library is skipped.
"""

from __future__ import annotations

import linecache
from dataclasses import replace

import pytest
import torch
from tests.conformance.cases import Case, Expected
from tests.conformance.libraries import diffusion, science, sequences, vision  # noqa: F401
from tests.conformance.libraries.declared import LIBRARY_MODELS
from tests.conformance.planted import PLANTED, assert_caught, planted
from tests.conformance.stages import built, run

from pytest_cudagraph import GraphRunner, pytree
from pytest_cudagraph.backends import open_backend

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.filterwarnings("default")]

REPLAYED = [
    name
    for name, each in LIBRARY_MODELS.items()
    if not each.verdict.startswith("audit") and each.verdict != "note: rng"  # nothing to compare a drawn number with
]
ONE_OF_EACH = {
    each.library: name for name, each in LIBRARY_MODELS.items() if each.verdict == "clean" and not each.on_cuda
}
BETWEEN = {(2, 4): (3,), (1,): ()}
"""By the captured sizes: a size that is padded to the larger one."""


def case_of(name):
    declared = LIBRARY_MODELS[name]
    pytest.importorskip(declared.library, reason=f"{declared.library} is not installed: python -m tox run -e nightly")
    return Case(name=name, build=declared.build, expected=Expected(), batch_dim=declared.batch_dim), declared


@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_a_model_of_a_library_gets_its_verdict_at_its_line(name, kind):
    case, declared = case_of(name)
    found = run(case, open_backend(kind), declared.sizes)
    assert found.verdict == declared.verdict_on(kind), (found.eager, found.audit.errors, found.refusal)
    for error in found.audit.errors[:1]:
        assert declared.line in linecache.getline(error.site.file, error.site.line)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_runner_gives_what_eager_gives_at_a_captured_size_and_between_two(name, kind):
    case, declared = case_of(name)
    if declared.verdict_on(kind) not in ("clean", declared.verdict):
        pytest.skip(f"{declared.verdict_on(kind)} on this device")
    backend = open_backend(kind)
    model, examples = built(case, backend, (*declared.sizes, *BETWEEN[declared.sizes]))
    sizes, dim = declared.sizes, declared.batch_dim
    first = examples[min(sizes)]
    with GraphRunner(model, *first.args, kwargs=first.kwargs, batch_sizes=sizes, batch_dim=dim, backend=backend) as run:
        for example in examples.values():
            with torch.inference_mode():
                wanted = pytree.tensors_in(model(*example.args, **example.kwargs))
            found = pytree.tensors_in(run(*example.args, **example.kwargs))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert run.statistics.refused == {}
    assert run.statistics.hits >= 1


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_bug_planted_in_a_model_of_a_library_is_caught(name, bug, kind):
    _, declared = case_of(name)
    case = replace(planted(name, declared.build, bug), batch_dim=declared.batch_dim)
    assert_caught(run(case, open_backend(kind), declared.sizes), bug)

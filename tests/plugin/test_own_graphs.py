"""``cudagraph.own`` without a GPU: nothing is pretended, and every wrong use is one clear error."""

from __future__ import annotations

import pytest

RUNNER = """
class Runner:
    def __init__(self, model):
        raise AssertionError("the runner is not made without a CUDA device")
"""


@pytest.fixture
def own(project):
    def run(call, *options):
        project.pytester.makepyfile(
            test_runner=f"from models import Mlp\nimport torch\n{RUNNER}\n"
            f"def test_runner(cudagraph):\n    model = Mlp().eval()\n    {call}\n"
        )
        return project.measure(*options)

    return run


CALL = "cudagraph.own(lambda: Runner(model), torch.randn(2, 16), eager=model, batch_sizes=[1, 2])"


def test_on_a_cpu_nothing_is_judged_and_the_reason_is_told(own):
    result = own(CALL)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["a runner's own graphs need a CUDA device; this run is on cpu*", "  (2 batch sizes)"])


def test_under_strict_what_is_not_judged_fails(own):
    own(CALL, "--cudagraph-strict").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("outputs='shared'", "outputs is one of kept, borrowed; found 'shared'"),
        ("steps=-1", "steps takes a whole number from 0; found -1"),
        ("threads=True", "threads takes a whole number from 0; found True"),
        ("between=3", "between takes a function without arguments; found 3"),
    ],
)
def test_a_wrong_argument_says_what_is_allowed(own, argument, message):
    result = own(CALL.replace("batch_sizes", f"{argument}, batch_sizes"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E*InputError: {message}*"])


def test_a_method_that_no_feature_adds_is_an_error_that_names_those_that_there_are(own):
    result = own("cudagraph.prove(model)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*AttributeError: cudagraph has no attribute 'prove'; features add own"])

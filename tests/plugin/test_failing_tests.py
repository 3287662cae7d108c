"""A gate that is missed is an ordinary failure: one exception of ours, in the call phase, none of our frames."""

from __future__ import annotations

import json

import pytest
from tests.plugin.conftest import failure_of

FAILING = {
    "slow_replay": "cudagraph(SlowUnderCapture().eval(), torch.randn(1, 16))",
    "wrong_replay": "cudagraph(WrongUnderCapture().eval(), torch.randn(1, 16))",
    "host_read": "cudagraph(ReadsTheHost().eval(), torch.randn(1, 16))",
    "baked_step": "cudagraph(BakesItsStep().eval(), torch.randn(1, 16))",
    "eager_error": "cudagraph(Mlp().eval(), torch.randn(1, 17))",
}


@pytest.mark.parametrize("test", FAILING)
def test_the_message_says_allowed_found_evidence_and_remedy(project, golden, test):
    project.write(**{test: FAILING[test]})
    result = project.measure("--cudagraph-batch-sizes=2")
    result.assert_outcomes(failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    golden(f"plugin/{test}.txt", failure_of(result))


def test_a_refused_capture_says_what_cuda_says_and_where(project, golden):
    project.pytester.makepyfile(
        """
        import torch
        from models import *

        def test_capture(capture_graphs):
            capture_graphs(ReadsTheHost().eval(), torch.randn(1, 16), batch_sizes=[2])
        """
    )
    result = project.measure()
    result.assert_outcomes(failed=1)
    golden("plugin/refused_capture.txt", failure_of(result))


def test_no_frame_of_ours_is_shown(project):
    project.write(slow=FAILING["slow_replay"], eager=FAILING["eager_error"], later=RAISES_LATER)
    text = project.measure().stdout.str()
    for failure in ("pytest_cudagraph.SpeedupTooLow: ", "RuntimeError: mat1", "pytest_cudagraph.CaptureFailed: "):
        assert failure in text
    assert "pytest_cudagraph/" not in text


RAISES_LATER = """
calls = []
def tires(x):
    calls.append(1)
    if len(calls) > 3:
        raise RuntimeError("tired")
    return x * 2 + 1
cudagraph(tires, torch.randn(1, 16))
"""


def test_a_model_that_raises_after_its_first_calls_says_when_and_where(project):
    project.write(later=RAISES_LATER)
    result = project.measure("--cudagraph-json=run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*CaptureFailed: the model raised RuntimeError: tired during warm-up or capture",
            'E*at test_user.py:* in tires: raise RuntimeError("tired")',
            "E*its first call at each batch size went well",
        ]
    )


def test_a_story_that_eager_ends_is_told_in_summary_and_document(project):
    project.write(eager=FAILING["eager_error"])
    result = project.measure("--cudagraph-json=run.json")
    result.stdout.fnmatch_lines(
        ["*::test_eager * not captured", "  batch 1: eager raised RuntimeError: *", "*(models.py:*)"]
    )
    (test,) = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert (test["nodeid"].partition("::")[2], test["verdict"]) == ("test_eager", "not-captured")


def test_outputs_of_no_use_are_told_in_summary_and_document_as_well(project):
    project.write(
        none="cudagraph(lambda x: None, torch.randn(1, 16))",
        object="cudagraph(lambda x: object(), torch.randn(1, 16))",
    )
    result = project.measure("--cudagraph-json=run.json")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*::test_none * not captured", "*::test_object * not captured", "2 not captured"])
    tests = json.loads((project.path / "run.json").read_text(encoding="utf-8"))["tests"]
    assert [test["verdict"] for test in tests] == ["not-captured", "not-captured"]
    assert [test["judgements"][0]["gate"] for test in tests] == ["eager", "eager"]


def test_a_failure_carries_its_report(project):
    project.pytester.makepyfile(
        f"""
        import pytest, torch
        from models import *
        from pytest_cudagraph import AuditFailed

        def test_audit(cudagraph):
            with pytest.raises(AuditFailed) as found:
                {FAILING["host_read"]}
            assert found.value.report.judgements[0].gate == "audit"
        """
    )
    project.measure().assert_outcomes(passed=1)


def test_a_failing_gate_can_be_expected(project):
    project.pytester.makepyfile(
        f"""
        import pytest, torch
        from models import *
        from pytest_cudagraph import SpeedupTooLow

        @pytest.mark.xfail(raises=SpeedupTooLow, strict=True)
        def test_slow(cudagraph):
            {FAILING["slow_replay"]}
        """
    )
    project.measure().assert_outcomes(xfailed=1)


def test_timings_of_a_wrong_replay_are_neither_shown_nor_saved(project):
    project.write(wrong=FAILING["wrong_replay"])
    result = project.measure("--cudagraph-update")
    row = next(line for line in result.outlines if line.rstrip().endswith("wrong"))
    assert "µs" not in row
    assert not list(project.path.glob(".cudagraph/*.json"))

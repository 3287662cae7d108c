"""Every mistake has a sentence of its own: what is allowed, what was found, what to do."""

from __future__ import annotations

import pytest
from tests.plugin.conftest import failure_of

MISTAKES = {
    "no_tensor": "cudagraph(Mlp(), 3)",
    "no_inputs": "cudagraph(Mlp())",
    "no_batch_dimension": "cudagraph(Mlp(), torch.tensor(1.0))",
    "batch_dim_out_of_range": "cudagraph(Mlp(), torch.randn(1, 16), batch_dim=2)",
    "batch_size_zero": "cudagraph(Mlp(), torch.randn(1, 16), batch_sizes=[0])",
    "batch_size_negative": "cudagraph(Mlp(), torch.randn(1, 16), batch_sizes=[1, -4])",
    "batch_size_twice": "cudagraph(Mlp(), torch.randn(1, 16), batch_sizes=[2, 2])",
    "empty_batch": "cudagraph(Mlp(), torch.randn(0, 16))",
    "name_twice": "model, x = Mlp().eval(), torch.randn(1, 16)\nfor _ in range(2): cudagraph(model, x, name='mine')",
    "another_device": "cudagraph(Mlp(), torch.randn(1, 16, device='meta'))",
    "no_tensor_in_output": "cudagraph(lambda x: 3, torch.randn(1, 16))",
    "generator_output": "cudagraph(lambda x: (row for row in x), torch.randn(1, 16))",
    "no_callable": "cudagraph('model', torch.randn(1, 16))",
    "keywords_in_a_list": "cudagraph(Mlp(), torch.randn(1, 16), kwargs=[1])",
    "keyword_that_is_no_name": "cudagraph(Mlp(), kwargs={1: torch.randn(1, 16)})",
    "name_that_is_no_text": "cudagraph(Mlp(), torch.randn(1, 16), name=3)",
    "empty_name": "cudagraph(Mlp(), torch.randn(1, 16), name='')",
    "unknown_compile": "cudagraph(Mlp(), torch.randn(1, 16), compile='jit')",
}


def test_each_mistake_is_answered_in_one_clear_error(project, golden):
    """One run for all of them: a process each would cost a second each."""
    project.write(**MISTAKES)
    result = project.measure("--tb=short", "-q")
    result.assert_outcomes(failed=len(MISTAKES))
    lines = [line for line in result.outlines if line.startswith("E ")]
    assert len(lines) == len(MISTAKES)
    golden("plugin/bad_input.txt", "\n".join(line.split(": ", 1)[1] for line in lines))
    assert "pytest_cudagraph/" not in result.stdout.str()


def test_without_the_flag_a_call_is_checked_as_well(project):
    project.write(**{test: MISTAKES[test] for test in ("no_callable", "keywords_in_a_list", "name_that_is_no_text")})
    result = project.run("--tb=short", "-q")
    result.assert_outcomes(failed=3)
    assert result.stdout.str().count("pytest_cudagraph.InputError: ") >= 3


NAN = """
report = cudagraph(lambda x: (x - x) / (x - x), torch.randn(1, 16), min_speedup=0.01)
for batch in report.batches:
    assert any("NaN" in note for note in batch.agreement.notes)
"""


def test_nan_outputs_are_compared_as_equal_and_said(project):
    project.write(nan=NAN)
    project.measure().assert_outcomes(passed=1)


@pytest.mark.parametrize("options", [["--cudagraph-device=cuda"], ["--cudagraph-require-gpu"]])
def test_a_machine_without_the_gpu_asked_for_is_a_usage_error(project, options):
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16))")
    result = project.run("--cudagraph", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


def test_a_mark_on_a_test_is_judged_before_any_test_runs(project):
    project.pytester.makepyfile(
        """
        import pytest

        def test_first():
            raise SystemExit("ran")

        @pytest.mark.graph_speedup(min="fast")
        def test_second(cudagraph):
            pass
        """
    )
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: test_a_mark_on_a_test_is_judged_before_any_test_runs.py::test_second: @pytest.mark.graph_speedup: "
         "min takes a number above 0; found 'fast'"]
    )  # fmt: skip


def test_a_broken_baseline_file_is_named_and_left_alone(project):
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)")
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    project.baseline.write_text("{broken", encoding="utf-8")
    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert str(project.baseline.name) in result.stderr.str()
    assert project.baseline.read_text(encoding="utf-8") == "{broken"


def test_the_message_of_an_eager_error_keeps_the_models_own_traceback(project):
    project.write(eager="cudagraph(Mlp().eval(), torch.randn(1, 17))")
    result = project.measure()
    result.stdout.fnmatch_lines(["*RuntimeError: *", "*EagerFailed: *"])
    assert "return self.second(self.first(x).relu())" in result.stdout.str()
    assert "no capture was tried" in failure_of(result)


def test_an_eager_error_of_our_own_making_says_what_to_change(project):
    project.write(
        lone_scale="cudagraph(lambda x, scale: x * scale, torch.randn(1, 16), torch.ones(1), batch_sizes=[1, 2])",
        needs_grad="cudagraph(lambda x: torch.autograd.grad((x * 2).sum(), x)[0], torch.randn(1, 16))",
    )
    result = project.measure()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*EagerFailed: batch 2: eager raised RuntimeError: The size of tensor*",
            "E*the example has batch 1; resized to 2: args[[]0[]], args[[]1[]]; a tensor without a batch dimension "
            "needs None in batch_dim",
            "E*EagerFailed: batch 1: eager raised RuntimeError: *",
            "E*models run under torch.inference_mode() here: what a graph serves has no backward pass",
        ]
    )

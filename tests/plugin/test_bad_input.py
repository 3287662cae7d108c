"""Every mistake has a sentence of its own: what is allowed, what was found, what to do."""

from __future__ import annotations

import re

import pytest
from tests.plugin.conftest import failure_of

MISTAKES = {
    "no_tensor": "cudagraph(Mlp(), 3, batch_sizes=[1, 2])",
    "sizes_without_rows": "cudagraph(Mlp(), torch.randn(1, 16), batch_dim=None, batch_sizes=[1, 2])",
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
    "argument_of_the_model": "cudagraph(Mlp(), torch.randn(1, 16), scale=2, mask=torch.ones(1))",
    "misspelt_argument": "cudagraph(Mlp(), torch.randn(1, 16), batch_size=2)",
    "class_for_an_object": "cudagraph(torch.nn.ReLU, torch.randn(1, 16))",
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


def test_a_strict_run_judges_every_mark_before_any_test_runs(project):
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
    result = project.run("--cudagraph-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: test_a_strict_run_judges_every_mark_before_any_test_runs.py::test_second: @pytest.mark.graph_speedup: "
         "min takes a number above 0; found 'fast'"]
    )  # fmt: skip


MISPLACED = """
import pytest

def test_good(cudagraph):
    {}

@pytest.mark.graph_speedup(min=1.2)
def test_marked():
    raise SystemExit("ran")
"""
ENDS = "raise SystemExit('ran')"


# pytest-benchmark 4.0 says on stderr that it is off under xdist: a line of its own, which is not ours to judge.
UNDER_XDIST = ("-p", "no:benchmark", "-n", "1")


alone_and_under_xdist = pytest.mark.parametrize(
    "options", [(), pytest.param(UNDER_XDIST, marks=pytest.mark.contract)], ids=["alone", "under xdist"]
)


@alone_and_under_xdist
def test_a_mark_that_is_wrong_fails_its_test_and_the_others_run(project, options, golden):
    project.pytester.makepyfile(test_user=MISPLACED.format("pass") + BAD_VALUE)
    result = project.measure("--cudagraph-only", *options)
    result.assert_outcomes(passed=1, errors=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = [line for line in result.outlines if re.match(r"test_user.py::.*@pytest.mark", line)]
    golden("plugin/bad_mark.txt", "\n".join(sorted(told)))


BAD_VALUE = """
@pytest.mark.graph_speedup(device="cuda", min="fast")
def test_value(cudagraph):
    raise SystemExit("ran")

@pytest.mark.xfail
@pytest.mark.graph_speedup(mni=1.2)
def test_expected_to_fail(cudagraph):
    raise SystemExit("ran")
"""


@alone_and_under_xdist
def test_a_mark_that_is_wrong_is_one_line_of_a_strict_run(project, options):
    project.pytester.makepyfile(test_user=MISPLACED.format(ENDS))
    result = project.measure("--cudagraph-strict", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: test_user.py::test_marked: @pytest.mark.graph_speedup needs a test that uses one of these fixtures: "
        "assert_replay_close, capture_graphs, compile_model, cudagraph, measure_speedup, perf_monitor, tune; found none"
    ]
    assert "INTERNALERROR" not in result.stdout.str()


def test_an_error_of_another_plugin_at_collection_is_not_covered(project):
    project.write(plain="raise SystemExit('ran')")
    project.pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems():
            raise pytest.UsageError("of another plugin")
        """
    )
    result = project.measure()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: of another plugin"])
    assert "INTERNALERROR" not in result.stdout.str()


def test_a_test_that_another_plugin_made_late_has_its_mark_read(project):
    project.pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            first = items[0]
            items.append(pytest.Function.from_parent(first.parent, name="test_late", callobj=first.obj))
        """
    )
    project.pytester.makepyfile(
        test_user="""
        import pytest, torch

        @pytest.mark.graph_speedup(batch_sizes=[1], min=0.01)
        def test_first(cudagraph, request):
            report = cudagraph(torch.nn.ReLU(), torch.randn(1, 4), name=request.node.name)
            assert [each.batch_size for each in report.batches] == [1]
        """
    )
    project.measure().assert_outcomes(passed=2)


TWO_OF_A_NAME = """
import pytest, torch

@pytest.mark.parametrize("depth", [4, 12])
def test_decode(cudagraph, depth):
    cudagraph(torch.nn.ReLU(), torch.randn(1, 4), name="decode")

def test_other_sizes(cudagraph):
    cudagraph(torch.nn.ReLU(), torch.randn(1, 4), batch_sizes=[16], name="decode")
"""


def test_a_name_of_another_tests_entries_is_refused(project):
    project.pytester.makepyfile(test_user=TWO_OF_A_NAME)
    result = project.run("--tb=short")
    result.assert_outcomes(passed=2, failed=1)
    assert failure_of(result) == (
        "pytest_cudagraph.InputError: an entry of a baseline is of one test; test_user.py::test_decode[N] and "
        "test_user.py::test_decode[N] both measure name 'decode', batch N: give each its own with name=..."
    )


@pytest.mark.contract
def test_a_baseline_with_merge_conflicts_is_refused_before_any_test_runs_in_xdist_workers_too(project):
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)")
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    text = project.baseline.read_text(encoding="utf-8")
    project.baseline.write_text(text.replace("{", "{\n<<<<<<< HEAD", 1), encoding="utf-8")
    project.pytester.makepyfile(test_user="def test_plain(cudagraph): raise SystemExit('ran')")
    result = project.measure(*UNDER_XDIST)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (told,) = [line for line in result.errlines if line]
    assert told.startswith(f"ERROR: {project.baseline}: not valid JSON (")
    assert told.endswith("); it holds unresolved merge conflicts: keep one side of each")


def test_a_broken_baseline_file_is_named_and_left_alone(project):
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16), min_speedup=0.01)")
    project.measure("--cudagraph-update").assert_outcomes(passed=1)
    project.baseline.write_text("{broken", encoding="utf-8")
    result = project.measure("--cudagraph-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert str(project.baseline.name) in result.stderr.str()
    assert project.baseline.read_text(encoding="utf-8") == "{broken"


def test_what_a_model_raises_by_itself_reaches_the_test_as_it_is(project):
    project.write(
        eager="cudagraph(Mlp().eval(), torch.randn(1, 17))",
        expected="with pytest.raises(RuntimeError, match='shapes'): cudagraph(Mlp().eval(), torch.randn(1, 17))",
    )
    result = project.measure()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E*RuntimeError: *",
            "E*cudagraph: at models.py:* in forward: return self.second(self.first(x).relu())",
            "E*cudagraph: the model fails by itself, without any graph",
        ]
    )
    assert "EagerFailed" not in result.stdout.str()
    assert "src/pytest_cudagraph" not in result.stdout.str()


def test_a_model_that_ends_the_process_shows_no_frame_of_ours(project):
    project.write(leaves="def leave(x): raise SystemExit(3)\ncudagraph(leave, torch.randn(1, 16))")
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*SystemExit: 3"])
    assert "src/pytest_cudagraph" not in result.stdout.str()


THREADS = """
from concurrent.futures import ThreadPoolExecutor
import threading
began, asked = threading.Event(), threading.Event()
def first(x):
    began.set()
    assert asked.wait(60)
    return x * 2
with ThreadPoolExecutor(1) as threads:
    told = threads.submit(cudagraph, first, torch.randn(1, 16), min_speedup=0.001)
    assert began.wait(60)
    try:
        cudagraph(lambda x: x + 1, torch.randn(1, 16), name="other")
    finally:
        asked.set()
        told.result()
"""


def test_a_second_thread_is_told_to_wait_and_the_first_ones_story_stands(project):
    project.write(threads=THREADS)
    result = project.measure()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*InputError: one thread at a time can use these fixtures; found a call while another thread's is under "
            "way: each would be in the other's capture, random numbers and timings; call them one after the other"
        ]
    )
    assert "ReplayMismatch" not in result.stdout.str()


def test_an_eager_error_of_our_own_making_says_what_to_change(project):
    project.write(
        fewer_rows="cudagraph(torch.nn.BatchNorm1d(16), torch.randn(2, 16), batch_sizes=[1])",
        lone_scale="cudagraph(lambda x, scale: x * scale, torch.randn(1, 16), torch.ones(1), batch_sizes=[1, 2])",
        needs_grad="cudagraph(lambda x: torch.autograd.grad((x * 2).sum(), x)[0], torch.randn(1, 16))",
    )
    result = project.measure()
    result.assert_outcomes(failed=3)
    by_itself = "E*cudagraph: the model fails by itself, without any graph"
    result.stdout.fnmatch_lines(
        [
            "E*ValueError: Expected more than 1 value per channel *",
            f"{by_itself}, at a batch size that the example does not have",
            "E*cudagraph: the example has batch 2; resized to 1: args[[]0[]]; batch_sizes=[[]2[]] runs it at its own "
            "size alone",
            "E*RuntimeError: The size of tensor*",
            f"{by_itself}, at a batch size that the example does not have",
            "E*cudagraph: the example has batch 1; resized to 2: args[[]0[]], args[[]1[]]; a tensor "
            "without a batch dimension needs None in batch_dim; batch_sizes=[[]1[]] runs it at its own size alone",
            "E*RuntimeError: *",
            "E*cudagraph: models run under torch.inference_mode() here: what a graph serves has no backward pass",
        ]
    )


@pytest.mark.parametrize("flag", ["json", "html"])
def test_a_document_in_the_folder_of_the_baselines_is_refused_before_any_test(project, flag):
    project.write(plain="pass")
    result = project.run("--cudagraph", f"--cudagraph-{flag}=.cudagraph/cpu.json")
    assert result.ret == 4
    words = "takes a path outside of the folder of the baselines; found '.cudagraph/cpu.json'"
    result.stderr.fnmatch_lines([f"ERROR: --cudagraph-{flag} {words}"])

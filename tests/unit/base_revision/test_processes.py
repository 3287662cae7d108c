"""One side's process: which tree it runs in, what it imports, what it leaves."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import H200, batch, judgement, latency, report, timing

from pytest_cudagraph import errors
from pytest_cudagraph.base_revision import processes
from pytest_cudagraph.base_revision.processes import CollectedOutcome, Command, RevisionProcess, Sample
from pytest_cudagraph.report import document, json_text
from pytest_cudagraph.values import Verdict


def side(top: Path, tree: Path, **changed) -> RevisionProcess:
    cache, name = changed.pop("cache", None), changed.pop("name", "the base")
    command = Command(**{"folder": top, "root": top, "arguments": (), "has_cache": cache is not None, **changed})
    return RevisionProcess(name=name, top=top, tree=tree, command=command, cache=cache or top / "cache")


@pytest.fixture
def trees(tmp_path):
    """The repository's own folder and a checkout of it."""
    top, tree = tmp_path / "top", tmp_path / "copy" / "top"
    for folder in (top, tree):
        (folder / "tests").mkdir(parents=True)
    return top, tree


def fake_pytest(monkeypatch, tmp_path, body):
    """A ``pytest`` of our own: what the process runs in place of the real one."""
    (tmp_path / "fake").mkdir()
    timed = replace(timing(), replay=replace(latency(3.0), q25_ns=2000.0))
    refused = batch(8, judgement(Verdict.WRONG, gate="check"))
    written = json_text(document([report("decoder", batch(4, timing=timed), refused, nodeid="t.py::test")], H200, {}))
    text = f"import json, os, sys, pathlib\nDOCUMENT = {written!r}\n{body}\n"
    (tmp_path / "fake" / "pytest.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))


WRITES = """
into = pathlib.Path(next(a for a in sys.argv if a.startswith("--cudagraph-sample=")).partition("=")[2])
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "path": os.environ["PYTHONPATH"].split(os.pathsep)}
seen["git"] = sorted(name for name in os.environ if name.startswith("GIT_"))
(into / "seen.json").write_text(json.dumps(seen))
(into / "run.json").write_text(DOCUMENT)
(into / "modules.json").write_text(json.dumps(["/x/model.py"]))
ends = {"t.py::test": ["failed", "ReplayMismatch: batch 8"], "u.py": ["skipped", "no GPU"]}
course = {"is_finished": True, "broken": [], "ends": ends}
(into / "course.json").write_text(json.dumps(course))
"""


def test_a_process_runs_the_users_command_in_the_tree_of_its_side(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    arguments = ["tests", "-k", "decoder", f"--conf={top}/c.ini", f"--other={top}-config/c.ini"]
    side(top, tree, folder=top / "tests", arguments=arguments, cache=tmp_path / "cache").sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["cwd"] == str(tree / "tests")
    assert seen["argv"] == [
        "tests",
        "-k",
        "decoder",
        f"--conf={tree}/c.ini",
        f"--other={top}-config/c.ini",
        "--cudagraph",
        "--cudagraph-only",
        f"--cudagraph-sample={tmp_path / 'into'}",
        "--maxfail=0",
        "-o",
        f"cache_dir={tmp_path / 'cache'}",
        f"--rootdir={tree}",
    ]


def test_in_a_folder_that_a_side_lacks_its_arguments_mean_the_same_files(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    (top / "more" / "new").mkdir(parents=True)
    (tree / "tests" / "test_a.py").touch()
    (top / "tests" / "test_a.py").touch()
    paths = ["../../tests/test_a.py::test_x"]
    side(top, tree, folder=top / "more" / "new", arguments=["-q", *paths], paths=paths).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["cwd"] == str(tree / "more" / "new")
    assert seen["argv"][:2] == ["-q", *paths]


def test_what_a_side_lacks_is_left_out_of_its_command(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    (top / "new").mkdir()
    (top / "tests" / "test_new.py").touch()
    gone = ["new", f"{top}/tests/test_new.py::test_one", "tests/test_new.py"]
    facts = {"arguments": ["-k", "one", *gone, "tests"], "paths": [*gone, "tests"]}
    side(top, tree, **facts).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["argv"][:4] == ["-k", "one", "tests", "--cudagraph"]
    # The working tree has them all.
    side(top, top, **facts).sample(tmp_path / "other")
    seen = json.loads((tmp_path / "other" / "seen.json").read_text())
    assert seen["argv"][:6] == ["-k", "one", *gone, "tests"]


def test_a_word_that_is_an_options_value_too_stays(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    (top / "new").mkdir()
    side(top, tree, arguments=["-k", "new", "new"], paths=["new"]).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["argv"][:3] == ["-k", "new", "new"]


def test_a_side_that_lacks_all_that_is_asked_for_has_no_tests_and_starts_no_process(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, "sys.exit(4)")
    (top / "new").mkdir()
    found = side(top, tree, arguments=["new"], paths=["new"]).sample(tmp_path / "into")
    assert found == Sample(batches={}, modules=())


def test_a_side_without_pytests_root_directory_cannot_be_measured(trees, tmp_path):
    top, tree = trees
    (top / "part" / "tests").mkdir(parents=True)
    part = side(top, tree, name="the base, v1 (abc),", folder=top / "part" / "tests", root=top / "part")
    with pytest.raises(errors.RevisionError) as caught:
        part.sample(tmp_path / "into")
    assert str(caught.value) == (
        "the base, v1 (abc), does not have pytest's root directory, part: none of its tests can be measured there"
    )


def test_code_is_imported_from_the_tree_and_installed_packages_are_left_where_they_are(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    installed = top / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(top), str(top / "tests"), str(top / "gone"), str(installed), *sys.path])
    side(top, tree).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["path"] == [str(tmp_path / "fake"), str(tree), str(tree / "tests")]


def test_a_sample_has_the_reports_of_its_process(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, WRITES)
    found = side(*trees).sample(tmp_path / "into")
    assert found.batches["decoder", 4].timing.replay.q25_ns == 2000.0
    assert found.batches["decoder", 4].receipt.kernels == 46
    assert found.batches["decoder", 8].timing is None
    assert found.nodeids == {"decoder": "t.py::test"}
    assert found.modules == ("/x/model.py",)


def test_words_behind_two_dashes_stay_the_last(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    side(top, tree, arguments=["-q", "--", "-odd-name"]).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["argv"][:2] == ["-q", "--cudagraph"]
    assert seen["argv"][-2:] == ["--", "-odd-name"]


def test_in_a_git_hook_the_tests_own_git_finds_the_tree_it_is_called_in(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, WRITES)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_AUTHOR_NAME"):
        monkeypatch.setenv(name, "x")
    side(*trees).sample(tmp_path / "into")
    assert json.loads((tmp_path / "into" / "seen.json").read_text())["git"] == ["GIT_AUTHOR_NAME"]


def test_how_each_test_ended_is_told_also_where_a_whole_file_was_skipped(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, WRITES)
    found = side(*trees).sample(tmp_path / "into")
    assert found.end_of("t.py::test") == CollectedOutcome(how="failed", why="ReplayMismatch: batch 8")
    assert found.end_of("u.py::Suite::test[a/b]") == CollectedOutcome(how="skipped", why="no GPU")
    assert found.end_of("t.py::test_later") is None
    assert found.end_of("t.py::test[1]") is None


@pytest.mark.parametrize(
    ("course", "trouble"),
    [
        ({"is_finished": False, "broken": ["t.py", "u.py"]}, "could not collect t.py"),
        ({"is_finished": True, "broken": [""]}, "could not collect its tests"),
        ({"is_finished": False, "broken": []}, "did not come to the end of its tests"),
    ],
)
def test_a_process_that_did_not_run_all_its_tests_is_an_error(trees, tmp_path, monkeypatch, course, trouble):
    """It has left its document all the same: what is not in it would pass for new."""
    left = f"(into / 'course.json').write_text(json.dumps({ {**course, 'ends': {}}!r}))"
    fake_pytest(monkeypatch, tmp_path, f"{WRITES}\n{left}\nprint('E  ImportError: generated')\nsys.exit(2)")
    with pytest.raises(errors.RevisionError) as caught:
        side(*trees, name="the base, v1 (abc),").sample(tmp_path / "into")
    assert str(caught.value) == (
        f"the base, v1 (abc), could not be measured: pytest ended with exit code 2 and {trouble}. "
        "The end of its output:\n"
        "  E  ImportError: generated\n"
        "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
    )


def test_a_process_that_leaves_nothing_is_an_error_with_the_end_of_its_output(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, "print('line one'); print('ERROR: no tests.yaml'); sys.exit(4)")
    with pytest.raises(errors.RevisionError) as caught:
        side(*trees, name="the base, v1 (abc),").sample(tmp_path / "into")
    assert str(caught.value) == (
        "the base, v1 (abc), could not be measured: pytest ended with exit code 4 and left no result. "
        "The end of its output:\n"
        "  line one\n"
        "  ERROR: no tests.yaml\n"
        "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
    )


def test_a_module_of_the_working_tree_is_foreign_only_if_the_checkout_holds_it_too(trees):
    top, tree = trees
    (tree / "model.py").touch()
    generated, installed = str(top / "generated.py"), str(top / ".venv" / "torch.py")
    files = (str(top / "model.py"), generated, installed, str(tree / "model.py"), "/usr/lib/json.py")
    found = Sample(batches={}, modules=files)
    assert processes.foreign_modules(found, top, tree) == ["model.py"]


def test_a_steady_drift_favours_neither_side():
    order = [side for pair in processes.run_order(0, 4) for side in pair]
    assert order == ["base", "head", "head", "base", "base", "head", "head", "base"]
    positions = {name: [i for i, side in enumerate(order) if side == name] for name in ("base", "head")}
    assert sum(positions["base"]) == sum(positions["head"])

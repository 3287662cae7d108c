"""One side's process: which tree it runs in, what it imports, what it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_cudagraph import errors, revisions
from pytest_cudagraph.revisions import Sample, Side


def side(top: Path, tree: Path, **changed) -> Side:
    facts = {"name": "the base", "top": top, "tree": tree, "folder": top, "root": top, "arguments": (), "cache": None}
    return Side(**{**facts, **changed})


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
    (tmp_path / "fake" / "pytest.py").write_text(f"import json, os, sys, pathlib\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))


WRITES = """
into = pathlib.Path(next(a for a in sys.argv if a.startswith("--cudagraph-sample=")).partition("=")[2])
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "path": os.environ["PYTHONPATH"].split(os.pathsep)}
(into / "seen.json").write_text(json.dumps(seen))
latency = {"median": 3e-6, "q25": 2e-6, "samples": 9}
arms = {"eager": latency, "replay": latency, "reference": latency}
batch = {"batch_size": 4, "verdict": "not-judged", "kernels": 7, **arms}
refused = {"batch_size": 8, "verdict": "wrong", "eager": None, "replay": None, "reference": None, "kernels": None}
tests = [{"name": "t.py::test", "verdict": "wrong", "batches": [batch, refused]}]
(into / "run.json").write_text(json.dumps({"tests": tests}))
(into / "modules.json").write_text(json.dumps(["/x/model.py"]))
"""


def test_a_process_runs_the_users_command_in_the_tree_of_its_side(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    arguments = ["tests", "-k", "decoder", f"--conf={top}/c.ini"]
    side(top, tree, folder=top / "tests", arguments=arguments, cache=tmp_path / "cache").sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["cwd"] == str(tree / "tests")
    assert seen["argv"] == [
        "tests",
        "-k",
        "decoder",
        f"--conf={tree}/c.ini",
        "--cudagraph-only",
        f"--cudagraph-sample={tmp_path / 'into'}",
        "--maxfail=0",
        "-o",
        f"cache_dir={tmp_path / 'cache'}",
        f"--rootdir={tree}",
    ]


def test_code_is_imported_from_the_tree_and_installed_packages_are_left_where_they_are(trees, tmp_path, monkeypatch):
    top, tree = trees
    fake_pytest(monkeypatch, tmp_path, WRITES)
    installed = top / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(top), str(top / "tests"), str(top / "gone"), str(installed), *sys.path])
    side(top, tree).sample(tmp_path / "into")
    seen = json.loads((tmp_path / "into" / "seen.json").read_text())
    assert seen["path"] == [str(tmp_path / "fake"), str(tree), str(tree / "tests")]


def test_the_readings_are_lower_quartiles_in_nanoseconds(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, WRITES)
    found = side(*trees).sample(tmp_path / "into")
    assert found.batches["t.py::test", 4] == revisions.SampledBatch(
        verdict="not-judged", eager_ns=2000.0, replay_ns=2000.0, reference_ns=2000.0, kernels=7
    )
    assert found.batches["t.py::test", 8].replay_ns is None
    assert found.verdicts == {"t.py::test": "wrong"}
    assert found.modules == ("/x/model.py",)


def test_a_process_that_leaves_nothing_is_an_error_with_the_end_of_its_output(trees, tmp_path, monkeypatch):
    fake_pytest(monkeypatch, tmp_path, "print('line one'); print('ERROR: no tests.yaml'); sys.exit(4)")
    with pytest.raises(errors.RevisionError) as caught:
        side(*trees, name="the base, v1 (abc),").sample(tmp_path / "into")
    assert str(caught.value) == (
        "the base, v1 (abc), could not be measured: pytest ended with exit code 4 and left no result. "
        "The end of what it said:\n"
        "  line one\n"
        "  ERROR: no tests.yaml\n"
        "  a checkout holds committed files only: what is generated or ignored has to be made by a conftest"
    )


def test_a_module_of_the_working_tree_is_foreign_only_if_the_checkout_holds_it_too(trees):
    top, tree = trees
    (tree / "model.py").touch()
    generated, installed = str(top / "generated.py"), str(top / ".venv" / "torch.py")
    files = (str(top / "model.py"), generated, installed, str(tree / "model.py"), "/usr/lib/json.py")
    found = Sample(batches={}, verdicts={}, modules=files)
    assert revisions.foreign_modules(found, top, tree) == ["model.py"]


def test_a_steady_drift_favours_neither_side():
    order = [side for pair in revisions.turns(0, 4) for side in pair]
    assert order == ["base", "head", "head", "base", "base", "head", "head", "base"]
    positions = {name: [i for i, side in enumerate(order) if side == name] for name in ("base", "head")}
    assert sum(positions["base"]) == sum(positions["head"])

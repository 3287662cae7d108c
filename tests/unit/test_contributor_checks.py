"""The workflows and hooks call what exists, the hooks check what CI checks, and CONTRIBUTING names what is there."""

from __future__ import annotations

import configparser
import os
import pkgutil
import re
from pathlib import Path

import pytest

import pytest_cudagraph

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def parsed(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def environments(command):
    return {name for names in re.findall(r"tox run .*?-e (\S+)", command) for name in names.split(",")}


def commands_of(workflow):
    jobs = parsed(f".github/workflows/{workflow}.yml")["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def hooks():
    return [hook for repo in parsed(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def test_the_cpu_workflow_runs_the_script_that_every_change_must_pass():
    assert commands_of("ci") == [".ci/run"]
    assert os.access(CI, os.X_OK)


def test_the_gpu_workflow_runs_the_gpu_environment_and_never_on_a_pull_request():
    assert environments("\n".join(commands_of("gpu"))) == {"gpu"}
    # YAML 1.1 reads the key "on" as true.
    assert parsed(".github/workflows/gpu.yml")[True].keys() == {"schedule", "workflow_dispatch"}


def test_the_hooks_run_environments_that_ci_runs_too():
    called = {name for hook in hooks() for name in environments(hook["entry"])}

    assert called == {"lint", "types"}
    assert called <= environments(CI.read_text(encoding="utf-8"))


def test_every_environment_that_is_called_is_defined():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    texts = [CI.read_text(encoding="utf-8"), *commands_of("ci"), *commands_of("gpu"), *(h["entry"] for h in hooks())]

    assert {f"testenv:{name}" for name in environments("\n".join(texts))} <= set(tox.sections())


def test_the_floors_are_those_that_import_linter_enforces():
    layers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\nlayers = [")[2].partition("\n]")[0]
    enforced = [layer.split(" | ") for layer in re.findall(r'"(.+)"', layers)]
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", CONTRIBUTING.partition("## The floors")[2].partition("\n## ")[0], re.M)

    assert [re.findall(r"`(\w+)`", modules) for _, modules in rows] == enforced
    assert [int(number) for number, _ in rows] == list(range(len(enforced), 0, -1))


def test_the_version_stands_in_one_place_and_in_the_citation():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[build-system]")[2]
    assert 'dynamic = ["version"]' in project
    assert parsed("CITATION.cff")["version"] == pytest_cudagraph.__version__


def test_every_path_that_contributing_names_exists():
    named = re.findall(r"`([\w./]*/[\w./]*|\w+\.(?:py|md|txt|toml))`", CONTRIBUTING)
    known = (ROOT, ROOT / "src" / "pytest_cudagraph", ROOT / "tests" / "conformance" / "models")

    assert [path for path in named if not any((folder / path).exists() for folder in known)] == []


def test_the_walk_names_functions_and_classes_that_exist():
    walk = CONTRIBUTING.partition("## From the fixture")[2].partition("\n## ")[0]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    classes = {name for text in sources for name in re.findall(r"^class (\w+)", text, re.M)}

    assert [name for name in re.findall(r"`([A-Z]\w+)`", walk) if name not in classes] == []
    functions = [name for name in re.findall(r"`([a-z_]+\.[\w.]+)`", walk) if name != "config.stash"]
    assert len(functions) >= 12
    assert [name for name in functions if not callable(pkgutil.resolve_name(f"pytest_cudagraph.{name}"))] == []

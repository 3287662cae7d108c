"""docs/hazards has a page for each hazard. The tests run its blocks and compare its message with a real run."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tests.conformance.cases import Case, Expected
from tests.conformance.stages import run

from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.hazards import CATALOGUE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "hazards"
IDS = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
MARK = "# <- this line"
KINDS = ("before", "after", "legal")
ASIDE = "mutates-state"
"""The note that stays if the fix is a write in place. Replays repeat that write."""

_BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DEVICE = re.compile(r"cpu: .*, torch \S+")


@functools.cache
def page(id_):
    return (FOLDER / f"{id_}.md").read_text(encoding="utf-8")


def blocks(id_):
    return {kind or language: text for language, kind, text in _BLOCK.findall(page(id_))}


WITH_LEGAL = [id_ for id_ in IDS if "legal" in blocks(id_)]


@pytest.fixture(autouse=True)
def _no_process_group_left():
    """The blocks of ``collective`` make one, as a script would."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def stages_of(tmp_path):
    """Run the stages on a block. Gives their results and the file of the block."""
    return functools.partial(_stages, tmp_path)


def _stages(folder, code):
    path = folder / "model.py"
    path.write_text(code, encoding="utf-8")
    file = str(path)

    def build():
        names = {"__name__": "hazard_page"}
        torch.manual_seed(0)
        exec(compile(code, file, "exec"), names)
        example = names["x"]
        return names["model"], example if isinstance(example, tuple) else (example,), {}

    return run(Case(name=file, build=build, expected=Expected()), open_backend("cpu")), file


def said_against(seen):
    said = [seen.said(stage) for stage in ("eager", "audit", "capture", "check")]
    return [each for each in said if each is not None]


def marked(code):
    return {number for number, line in enumerate(code.splitlines(), 1) if MARK in line}


def test_every_hazard_has_a_page_and_every_page_is_of_a_hazard():
    assert IDS == sorted(CATALOGUE)


def test_the_index_names_every_page_in_the_words_of_the_catalogue():
    rows = [line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| [")]

    assert rows == [
        f"| [`{each.id}`]({each.id}.md) | {'loud' if each.loud else 'silent'} | {each.what} |"
        for each in CATALOGUE.values()
    ]


@pytest.mark.parametrize("id_", IDS)
def test_a_page_begins_with_the_words_of_the_catalogue(id_):
    title, _, first, *_ = page(id_).splitlines()

    assert title == f"# {id_}"
    assert first == f"{'Loud' if CATALOGUE[id_].loud else 'Silent'}: {CATALOGUE[id_].what}."


@pytest.mark.parametrize("id_", IDS)
def test_a_page_has_a_model_a_fix_and_a_message_and_no_more_than_fits(id_):
    found = blocks(id_)

    assert {"before", "after"} <= found.keys()
    assert found.keys() & {"text", "json"}
    assert found.keys() <= {*KINDS, "text", "json"}
    assert len(page(id_).splitlines()) <= 120
    prose = [line for line in _BLOCK.sub("", page(id_)).splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 128


@pytest.mark.parametrize("id_", IDS)
def test_the_model_has_the_hazard_at_the_line_that_is_marked(id_, stages_of):
    code = blocks(id_)["before"]
    seen, file = stages_of(code)
    findings = [finding for finding in seen.audit.findings if finding.id == id_]
    sites = {finding.site.line for finding in findings if finding.site and finding.site.file == file}

    # A test fails with the message of the first stage. Later stages may name a consequence.
    assert said_against(seen)[:1] == ([] if "json" in blocks(id_) else [id_])
    assert findings
    assert sites <= marked(code)
    assert bool(sites) == bool(marked(code))
    assert {finding.id for finding in seen.audit.findings} <= {id_, ASIDE, "stateful-python"}


@pytest.mark.parametrize("id_", IDS)
def test_the_fix_leaves_nothing(id_, stages_of):
    seen, _ = stages_of(blocks(id_)["after"])

    assert said_against(seen) == []
    assert seen.notes <= {ASIDE}
    if seen.notes:
        assert ASIDE in page(id_).partition("## Other shapes")[0], "the page explains a note that stays"


@pytest.mark.parametrize("id_", WITH_LEGAL)
def test_what_is_called_legal_fails_nowhere(id_, stages_of):
    seen, _ = stages_of(blocks(id_)["legal"])

    assert said_against(seen) == []
    assert seen.notes <= {id_, "stateful-python"}


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """One run of pytest over the models with hazards. Gives its output and its tests by id."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "conftest.py").write_text("import torch\n\ntorch.manual_seed(0)\n")
    for id_ in IDS:
        test = "\n\ndef test_it(cudagraph):\n    cudagraph(model, *(x if isinstance(x, tuple) else (x,)))\n"
        (folder / f"test_{id_.replace('-', '_')}.py").write_text(blocks(id_)["before"] + test)
    options = ("--cudagraph", "--cudagraph-batch-sizes=2", "--cudagraph-time-budget=0.2", "--cudagraph-json=run.json")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no", *options]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False).stdout
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return out, {each["nodeid"].partition(".py")[0].removeprefix("test_"): each for each in document["tests"]}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="operators have other names in other torches")
@pytest.mark.parametrize("id_", IDS)
def test_the_message_is_that_of_a_real_run(id_, real_run):
    kind, found = message_of(id_, *real_run)
    found = found.replace(f"test_{id_.replace('-', '_')}.py", "model.py")
    if os.environ.get("GOLDEN") == "update":
        path = FOLDER / f"{id_}.md"
        path.write_text(re.sub(rf"```{kind}\n.*?```", lambda _: f"```{kind}\n{found}\n```", page(id_), flags=re.DOTALL))
        page.cache_clear()

    assert blocks(id_)[kind] == f"{found}\n", "GOLDEN=update rewrites it for review"


def message_of(id_, out, tests):
    name = f"test_{id_.replace('-', '_')}.py"
    if "json" in blocks(id_):
        (finding,) = [each for each in tests[id_.replace("-", "_")]["findings"] if each["id"] == id_]
        shown = finding | {"file": Path(finding["file"]).name} if finding["file"] else finding
        return "json", json.dumps(shown, indent=2)
    section = out.partition(f"\n{name}")[0].rpartition("\n____")[2] if f"\n{name}:" in out else ""
    # pytest indents the message like the line that raised. The pages do not.
    lines = [f"E{line[5:]}" for line in section.splitlines() if line.startswith("E ")]
    return "text", _DEVICE.sub("cpu: Intel(R) Xeon(R) Processor, torch 2.13.0+cpu", "\n".join(lines))


@pytest.mark.parametrize("id_", [id_ for id_ in IDS if "text" in blocks(id_)])
def test_the_message_leads_to_the_page(id_):
    last = blocks(id_)["text"].splitlines()[-1]

    assert last == f"E     more: pytest-cudagraph explain {id_}"
    assert len(last) <= 100


def included():
    """The folders that the wheel takes from outside the package, and their places in the package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[tool.hatch.build.targets.wheel.force-include]")[2].partition("\n[")[0]
    return dict(re.findall(r'^"(.+)" = "(.+)"$', section, re.MULTILINE))


@pytest.fixture
def installed(tmp_path):
    """The package in the layout of a wheel, in a folder without docs."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "pytest_cudagraph", tmp_path / "site" / "pytest_cudagraph", ignore=skip)
    for source, target in included().items():
        shutil.copytree(ROOT / source, tmp_path / "site" / target)
    return tmp_path / "site"


ASK = """
import sys
from pytest_cudagraph.cli import command, main
assert command.__file__.startswith(sys.argv[1]), command.__file__
code = main(["explain", *sys.argv[2:]])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


def asked(path, *ids):
    command = [sys.executable, "-c", ASK, str(path), *ids]
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


def test_an_installed_package_explains_without_torch(installed):
    assert asked(installed, "rng") == (0, page("rng"), "")


def test_a_zipped_package_explains_too(installed, tmp_path):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for path in sorted(installed.rglob("*")):
            written.write(path, path.relative_to(installed))

    assert asked(archive, "rng") == (0, page("rng"), "")


def test_a_package_that_lost_its_pages_says_so(installed):
    for target in included().values():
        shutil.rmtree(installed / target)
    code, out, err = asked(installed, "rng")

    assert (code, out) == (4, "")
    assert err.startswith("pytest-cudagraph: the pages on hazards are missing: neither ")

"""The README and the tutorial, done as a reader would: write each file, run each command, compare what is printed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from pathlib import Path

import pytest
from tests.plugin.conftest import masked

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r'^```(?:(?P<language>\w+) title="(?P<file>.+?)"|console)\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/tutorial.md", "README.md"])
def test_each_command_of_the_page_prints_what_stands_below_it(project, page):
    path, update = ROOT / page, os.environ.get("GOLDEN") == "update"
    # A reader's figures are those of the usual clock.
    run = project.run_alone if update else project.run

    def done(block):
        if block["file"]:
            target = project.path / block["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(written(block, target), encoding="utf-8")
            return block.group()
        command = block["text"].splitlines()[0]
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "pytest"
        return "\n".join(["```console", command, *shown(run(*arguments).outlines), "```"])

    text = path.read_text(encoding="utf-8")
    assert len(re.findall("^\\$ ", text, re.MULTILINE)) == len(re.findall("^```console$", text, re.MULTILINE)) > 0
    found = BLOCK.sub(done, text)
    if update:
        path.write_text(found, encoding="utf-8")
        text = found
    assert plain(found) == plain(text), "GOLDEN=update rewrites the page for review"


def test_the_readme_shows_a_passing_test_and_its_failure_first_and_stays_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_output, _, rest = text.partition("```console")[2].partition("```")
    assert len(text.splitlines()) <= 95
    assert len(text.splitlines()) - len(rest.splitlines()) + 1 <= 40
    assert (" passed " in first_output, " failed " in rest.partition("```console")[2]) == (True, True)
    assert text.count("python -m pip install tox && python -m tox run -e ") == 2


def written(block, target):
    """What the file holds after this block; a diff replaces one line of it."""
    if block["language"] != "diff":
        return block["text"]
    removed, added = (line[1:] + "\n" for line in block["text"].splitlines())
    before = target.read_text(encoding="utf-8")
    assert before.count(removed) == 1
    return before.replace(removed, added)


def shown(lines):
    """What the plugin says, and pytest's last line."""
    at = next(number for number, line in enumerate(lines) if line.strip("=") == " cudagraph ")
    before = [line for line in lines[:at] if line.startswith(("cudagraph: ", "E "))]
    below = itertools.takewhile(lambda line: not line.startswith("="), lines[at + 1 :])
    return [*before, *filter(None, below), f"=== {lines[-1].strip('= ')} ==="]


def plain(text):
    """The lines, equal on every machine."""
    lines = masked(re.sub(r"cpu-[\w-]+\.json", "cpu-NAME.json", text)).splitlines()
    return [" ".join(line.split()) for line in lines]

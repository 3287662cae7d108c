"""``pytest-cudagraph check``: what it says of a factory, and the test that it prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_cudagraph.cli import main

MODELS = """
import torch
from torch import nn


class Counting(nn.Linear):
    step = 0

    def forward(self, x):
        self.step += 1
        return super().forward(x) * self.step


class Skips(nn.Module):
    def forward(self, x):
        __import__("pytest").skip("not here")


def alone(): return nn.Sequential(nn.Linear(64, 8), nn.ReLU()).eval()
def pair(): return Counting(8, 8).eval(), torch.randn(2, 8)
def keywords(): return nn.Linear(8, 8).eval(), {"input": torch.randn(2, 8)}
def skips(): return Skips(), torch.randn(2, 8)
def leaves(): raise SystemExit(0)
def model(): return nn.Linear(8, 8).eval(), torch.randn(2, 8)
def test_linear(): return nn.Linear(8, 8).eval(), torch.randn(2, 8)
def listed(): return [nn.Linear(8, 8)]
def raises(): raise OSError("no weights here")
number = 3
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A folder with the user's module, and with a pytest.ini that would break any run of pytest."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "skipped.py").write_text("import pytest\npytest.skip('not here', allow_module_level=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mymodels", None)


def test_check_runs_the_stages_and_prints_the_test_it_ran(workplace):
    """In a process of its own: pytest runs in it."""
    calls = [
        ["mymodels:alone", "--inputs=1x64", "--batch-sizes=1,3"],
        ["mymodels:pair"],
        ["mymodels:keywords", "--device=cpu"],
        ["mymodels:skips"],
        ["mymodels:model"],
        ["mymodels:test_linear"],
    ]
    script = f"from pytest_cudagraph.cli import main\nfor call in {calls}: print('exit', main(['check', *call]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=workplace)

    passed, failed, keywords, skips, model, test_linear, end = done.stdout.split("exit ")
    assert "test_alone.py::test_alone      1" in passed
    assert "                              3" in passed
    assert "import torch\nfrom mymodels import alone\n\n\ndef test_alone(cudagraph):\n" in passed
    assert passed.endswith("    model = alone()\n    cudagraph(model, torch.randn(1, 64))\n")
    assert failed.startswith("0\n")
    assert "AuditFailed: mymodels.py:11: a Python number differs" in failed
    assert failed.endswith("    model, inputs = pair()\n    cudagraph(model, inputs)\n")
    assert keywords.startswith("1\n")
    assert keywords.endswith("    cudagraph(model, kwargs=inputs)\n")
    assert skips.endswith("\nit did not pass: nothing was tested\n")
    assert model.startswith("1\n")
    assert "from mymodels import model as make_model\n\n\ndef test_model(cudagraph):\n" in model
    assert "from mymodels import test_linear as make_model\n\n\ndef test_linear(cudagraph):\n" in test_linear
    assert (test_linear[0], end) == ("0", "0\n")
    assert "to save one" not in done.stdout
    assert sorted(each.name for each in workplace.iterdir() if each.name != "__pycache__") == [
        "leaves.py",
        "mymodels.py",
        "pytest.ini",
        "skipped.py",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mymodels"], "check takes package.module:factory, such as models:make; found 'mymodels'"),
        (["mymodels:a b"], "check takes package.module:factory, such as models:make; found 'mymodels:a b'"),
        (["nomodels:make"], "nomodels cannot be imported: ModuleNotFoundError: No module named 'nomodels'"),
        (
            ["mymodels:alon"],
            "must name a function or a class without arguments; found nothing of that name; nearest: al",
        ),
        (["leaves:make"], "leaves cannot be imported: it calls sys.exit(0)\n  to fix: call it only under if __name__"),
        (["skipped:make"], "skipped cannot be imported: Skipped: not here"),
        (["mymodels:number"], "mymodels:number must name a function or a class without arguments; found 3"),
        (["mymodels:alone"], "alone returned a model without example inputs\n  to fix: give their shapes"),
        (["mymodels:listed"], "listed must return a model, or (model, inputs); found [Linear("),
        (["mymodels:alone", "--inputs="], "--inputs takes 1x64, 1x8:int64 or 1x8:int64:50257"),
        (["mymodels:alone", "--inputs=1x0"], "found '1x0'"),
        (["mymodels:alone", "--inputs=1x8,1x8:long"], "found '1x8:long'\n  dtypes: float32, float64"),
        (["mymodels:alone", "--inputs=1x8:float16:5"], "found '1x8:float16:5'"),
    ],
)
def test_check_refuses_a_target_and_inputs_it_cannot_use(capsys, arguments, told):
    assert main(["check", *arguments]) == 4
    assert told in capsys.readouterr().err


def test_check_shows_the_frames_of_a_factory_that_raises_and_none_of_its_own(capsys):
    assert main(["check", "mymodels:raises"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Traceback (most recent call last):\n")
    assert "first_test.py" not in out
    assert out.endswith("OSError: no weights here\nraises failed\n")


def test_a_factory_that_leaves_is_a_failure(capsys):
    assert main(["check", "mymodels:leaves"]) == 1
    assert capsys.readouterr().out.endswith("SystemExit: 0\nleaves failed\n")


def passing(file, text, arguments, outcome):
    outcome.has_passed = True
    return 0


@pytest.mark.parametrize(
    ("inputs", "arguments"),
    [
        ("4", "torch.randn(4)"),
        ("1x64, 1x8:int64", "torch.randn(1, 64), torch.randint(2, (1, 8))"),
        ("1x8:int64:50257", "torch.randint(50257, (1, 8))"),
        ("4:int32", "torch.randint(2, (4,), dtype=torch.int32)"),
        ("1x3x8:bfloat16", "torch.randn(1, 3, 8, dtype=torch.bfloat16)"),
        ("1x8:bool", "torch.ones((1, 8), dtype=torch.bool)"),
    ],
)
def test_inputs_become_the_arguments_of_the_call(monkeypatch, capsys, inputs, arguments):
    monkeypatch.setattr("pytest_cudagraph.cli.first_test._run", passing)
    assert main(["check", "mymodels:alone", f"--inputs={inputs}"]) == 0
    assert capsys.readouterr().out.endswith(f"    cudagraph(model, {arguments})\n")

"""Take the pictures of docs/page.md: ``python benchmarks/page_pictures.py``. Needs playwright and chromium.

Two examples and a model with a hazard run six times on the CPU, each run a session of the baseline. The page of the
last run is shown in a wide light window and in a narrow dark one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SESSIONS = 6

HAZARD = """
import torch
from torch import nn


class Normalised(nn.Module):
    def forward(self, x):
        return x / x.abs().max().item()


def test_normalised(cudagraph):
    cudagraph(Normalised(), torch.randn(1, 64))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for example in ("test_linear_classifier.py", "test_transformer.py"):
            shutil.copy(ROOT / "examples" / example, folder)
        (folder / "test_normalised.py").write_text(HAZARD, encoding="utf-8")
        options = ["--cudagraph", "--cudagraph-device=cpu", "--cudagraph-update", "--cudagraph-time-budget=2"]
        command = [sys.executable, "-m", "pytest", "-q", "-k", "not per_batch", *options, "--cudagraph-html=page.html"]
        for _ in range(SESSIONS):
            subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL, timeout=600)
        with sync_playwright() as started:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            take(browser, folder / "page.html")
            browser.close()


def take(browser: Browser, page: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, width, height, scheme in (("light", 1180, 1260, "light"), ("narrow-dark", 320, 900, "dark")):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        shown = context.new_page()
        shown.goto(page.as_uri())
        # On a busy machine a test may be inconclusive, and is unfolded too.
        shown.locator(".test").evaluate_all(
            "all => all.forEach((each) => { each.open = /normalised|linear/.test(each.textContent) })"
        )
        shown.screenshot(path=PICTURES / f"page-{name}.png")
        context.close()


if __name__ == "__main__":
    main()

"""The command ``pytest-cudagraph``."""

from pytest_cudagraph.cli.command import main, make_parser

__all__ = ["main", "make_parser"]

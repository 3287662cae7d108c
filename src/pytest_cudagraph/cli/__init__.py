"""The command ``pytest-cudagraph``."""

from pytest_cudagraph.cli.command import _parser, main

__all__ = ["_parser", "main"]

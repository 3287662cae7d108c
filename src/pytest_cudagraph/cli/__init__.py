"""The command ``pytest-cudagraph``."""

from pytest_cudagraph.cli.command import main, make_parser

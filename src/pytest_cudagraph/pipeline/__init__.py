"""The story of a run, stage by stage, without a word of pytest."""

from pytest_cudagraph.pipeline.bench import Bench, Progress, open_bench
from pytest_cudagraph.pipeline.ending import Collected, Ending, end_run, header_lines
from pytest_cudagraph.pipeline.graphs import CompiledModel, Graphs
from pytest_cudagraph.pipeline.revisions import AgainstBase, Command, compare_revisions
from pytest_cudagraph.pipeline.story import Story, tell
from pytest_cudagraph.pipeline.subject import make_subject, nothing_judged, run_once

__all__ = [
    "AgainstBase",
    "Bench",
    "Collected",
    "Command",
    "CompiledModel",
    "Ending",
    "Graphs",
    "Progress",
    "Story",
    "compare_revisions",
    "end_run",
    "header_lines",
    "make_subject",
    "nothing_judged",
    "open_bench",
    "run_once",
    "tell",
]

"""Another revision of the project beside the working tree: checked out, run in processes of its own, in turn.

Knows git and processes, neither torch nor pytest's classes.
"""

from pytest_cudagraph.revisions.processes import Side
from pytest_cudagraph.revisions.samples import (
    COURSE,
    DOCUMENT,
    MODULES,
    End,
    Sample,
    SampledBatch,
    foreign_modules,
    module_files,
)
from pytest_cudagraph.revisions.turns import turns
from pytest_cudagraph.revisions.worktree import Revision, checked_out, find_revision

__all__ = [
    "COURSE",
    "DOCUMENT",
    "MODULES",
    "End",
    "Revision",
    "Sample",
    "SampledBatch",
    "Side",
    "checked_out",
    "find_revision",
    "foreign_modules",
    "module_files",
    "turns",
]

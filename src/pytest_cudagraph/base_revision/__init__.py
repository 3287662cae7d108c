"""``--cudagraph-base``: the same tests at another revision, checked out, measured in turn, compared and judged."""

from pytest_cudagraph.base_revision.checkout import Revision, checked_out, find_revision
from pytest_cudagraph.base_revision.processes import (
    COURSE,
    DOCUMENT,
    MODULES,
    CollectedOutcome,
    RevisionProcess,
    Sample,
    foreign_modules,
    module_files,
    run_order,
)

"""The end of a run: what is written and what the summary says. It imports no torch: an xdist controller needs none."""

from pytest_cudagraph.summary.run_summary import RunSummary, end_run, header_line
from pytest_cudagraph.summary.saved_entries import CollectedTests

"""The texts and documents of a run. Pure: returns lines and dicts, prints and writes nothing."""

from pytest_cudagraph.report.closing import closing, strict_text
from pytest_cudagraph.report.codec import from_plain, report_to_plain, seconds, to_plain
from pytest_cudagraph.report.columns import Column, grid, scenario_tables, text_of
from pytest_cudagraph.report.document import Run, document, json_text, run_of_document
from pytest_cudagraph.report.failure import failure_text, suggestions
from pytest_cudagraph.report.github import STEP_SUMMARY_BYTES, annotation, sites_of_failure, step_summary
from pytest_cudagraph.report.page import page
from pytest_cudagraph.report.run_tables import changes, ranking_tables, run_tables
from pytest_cudagraph.report.table import Row, device_text, header, properties, render, rows_of, table
from pytest_cudagraph.report.workloads import WorkloadTest, cells_of

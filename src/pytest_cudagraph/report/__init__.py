"""The texts and documents of a run. Pure: returns lines and dicts, prints and writes nothing."""

from pytest_cudagraph.report.closing import closing
from pytest_cudagraph.report.columns import Column, grid, text_of
from pytest_cudagraph.report.document import document, json_text, properties
from pytest_cudagraph.report.document_entries import entries_of_document
from pytest_cudagraph.report.document_rows import device_of_document, rows_of_document
from pytest_cudagraph.report.entry_history import history_lines, history_page
from pytest_cudagraph.report.failure import failure_text, suggestions
from pytest_cudagraph.report.github import STEP_SUMMARY_BYTES, annotation, sites_of_failure, step_summary
from pytest_cudagraph.report.page import page
from pytest_cudagraph.report.rankings import changes, rankings
from pytest_cudagraph.report.run_tables import tables
from pytest_cudagraph.report.table import Row, device_text, header, render, rows_of, table
from pytest_cudagraph.report.transport import from_plain, to_plain

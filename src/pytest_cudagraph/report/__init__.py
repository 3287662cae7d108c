"""The words and documents a run leaves behind. Pure: yields lines and dicts, prints nothing, writes nothing."""

from pytest_cudagraph.report.base import base_table
from pytest_cudagraph.report.columns import Column, grid
from pytest_cudagraph.report.document import document, json_text, properties, rows_of_document
from pytest_cudagraph.report.failure import failure_text
from pytest_cudagraph.report.header import device_text, header
from pytest_cudagraph.report.plain import from_plain, to_plain
from pytest_cudagraph.report.suggest import suggestions
from pytest_cudagraph.report.table import Row, closing, render, rows_of, table

__all__ = [
    "Column",
    "Row",
    "base_table",
    "closing",
    "device_text",
    "document",
    "failure_text",
    "from_plain",
    "grid",
    "header",
    "json_text",
    "properties",
    "render",
    "rows_of",
    "rows_of_document",
    "suggestions",
    "table",
    "to_plain",
]

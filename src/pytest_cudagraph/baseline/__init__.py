"""What earlier runs measured, kept in files that are reviewed like source code."""

from pytest_cudagraph.baseline.names import Key, normal_name, slug
from pytest_cudagraph.baseline.schema import SCHEMA, Content, parse, text_of
from pytest_cudagraph.baseline.store import JsonStore, MemoryStore, read, remove_from

__all__ = [
    "SCHEMA",
    "Content",
    "JsonStore",
    "Key",
    "MemoryStore",
    "normal_name",
    "parse",
    "read",
    "remove_from",
    "slug",
    "text_of",
]

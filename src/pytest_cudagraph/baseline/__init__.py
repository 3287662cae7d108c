"""What earlier runs measured, kept in files that are reviewed like source code."""

from pytest_cudagraph.baseline.history import (
    ENOUGH,
    KEPT,
    NO_FIGURES,
    PRIOR_SPREAD,
    age,
    arms_moved,
    change,
    change_of_sessions,
    continued,
    figure_changes,
    is_continued,
    latency_change,
    moved_figures,
    session_of,
    session_of_arm,
)
from pytest_cudagraph.baseline.remote import AnyPath, RemotePath, any_path
from pytest_cudagraph.baseline.schema import SCHEMA, Content, Key, parse
from pytest_cudagraph.baseline.store import Edit, JsonStore, json_files, read, remove_from
from pytest_cudagraph.baseline.text import normal_name, parametrized, records_of, slug, text_of

"""What of a command line names the repository, and is moved to another copy of it."""

from __future__ import annotations

import os

import pytest

from pytest_cudagraph.base_revision.checkout import moved_argument


@pytest.fixture
def places(tmp_path):
    """A repository whose folder's name holds a space, another copy of it, and a neighbour of nearly that name."""
    names = {"TOP": "my repo", "TREE": "copy/my repo", "NEIGHBOUR": "my repo-config"}
    found = {name: tmp_path / folder for name, folder in names.items()}
    for folder in found.values():
        (folder / "tests").mkdir(parents=True)
    return found


def moved(argument, places):
    """What becomes of an argument, with the places under their names again."""
    for name, place in places.items():
        argument = argument.replace(name, str(place))
    found = moved_argument(argument, places["TOP"], places["TREE"])
    for name in ("NEIGHBOUR", "TREE", "TOP"):
        found = found.replace(str(places[name]), name)
    return found


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("TOP", "TREE"),
        ("TOP/", "TREE"),
        ("TOP/tests/test_a.py::test_b[x/../y=::z]", "TREE/tests/test_a.py::test_b[x/../y=::z]"),
        ("TOP/tests/../other", "TREE/other"),
        ("--junitxml=TOP/out.xml", "--junitxml=TREE/out.xml"),
        ("-cTOP/pytest.ini", "-cTREE/pytest.ini"),
        ("cache_dir=TOP/cache", "cache_dir=TREE/cache"),
        ("--override-ini=cache_dir=TOP/cache", "--override-ini=cache_dir=TREE/cache"),
    ],
)
def test_a_path_below_the_repository_is_moved(places, argument, expected):
    assert moved(argument, places) == expected


@pytest.mark.parametrize(
    "argument",
    [
        "NEIGHBOUR/pytest.ini",
        "--rootdir=NEIGHBOUR",
        "-cNEIGHBOUR/pytest.ini",
        "TOP/../my repo-config/pytest.ini",
        "TOP.old/test_a.py::test_b",
        "/elsewhereTOP/tests",
        "/",
        "tests/test_a.py::test_b",
        "-k",
        "not slow",
        "-k=a/b",
        "",
    ],
)
def test_anything_else_stays_as_it_is(places, argument):
    assert moved(argument, places) == argument


def test_a_list_of_paths_is_moved_path_by_path(tmp_path):
    top, tree = tmp_path / "repo", tmp_path / "copy"
    given = f"pythonpath={top}/src {top}-data {top}"
    assert moved_argument(given, top, tree) == f"pythonpath={tree}/src {top}-data {tree}"
    given = f"--path={os.pathsep.join([f'{top}/src', f'{top}2', str(top)])}"
    assert moved_argument(given, top, tree) == f"--path={os.pathsep.join([f'{tree}/src', f'{top}2', str(tree)])}"


def test_a_link_to_the_repository_is_the_repository_and_a_link_within_it_stays_a_link(places, tmp_path):
    top, tree = places["TOP"], places["TREE"]
    (tmp_path / "link").symlink_to(top)
    (top / "inner").symlink_to(top / "tests")
    assert moved_argument(f"{tmp_path}/link/inner/test_a.py", top, tree) == f"{tree}/inner/test_a.py"

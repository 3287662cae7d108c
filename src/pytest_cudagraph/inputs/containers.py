"""What a call leaves in the dicts and lists that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_cudagraph.inputs.example import argument_name

Named = Sequence[tuple[str, Any]]
"""Leaves of the pair ``(args, kwargs)``, with their paths."""


def container_changes(before: Named, after: Named) -> Iterator[tuple[str, str, Any]]:
    """What was ``added`` or ``replaced``: the name of its place, the word, and what is there now.

    Items taken out are not told: a model may use up the dict it is given.
    """
    then = dict(before)
    for path, leaf in after:
        if path not in then:
            yield argument_name(path), "added", leaf
        elif leaf is not then[path]:
            yield argument_name(path), "replaced", leaf

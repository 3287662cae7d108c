"""The user's source code: which line runs or raised, and what the source spells out."""

from pytest_cudagraph.sources.user_lines import (
    Sites,
    _is_user_file,
    describe,
    origin_of,
    user_frame,
    user_site,
    user_site_of,
    user_sites,
)

__all__ = ["Sites", "_is_user_file", "describe", "origin_of", "user_frame", "user_site", "user_site_of", "user_sites"]

"""The user's source code: the line that runs or raised, and facts that the source text shows."""

from pytest_cudagraph.sources.user_lines import (
    Sites,
    calling_frame,
    describe,
    is_in_higher_order_operator,
    library_of,
    origin_of,
    raised_in_user_code,
    user_frame,
    user_site,
    user_site_of,
    user_sites,
)

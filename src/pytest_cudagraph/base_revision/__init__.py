"""``--cudagraph-base``: the same tests at another revision, checked out, measured in turn, compared and judged."""

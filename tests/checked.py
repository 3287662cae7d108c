"""Capture and check of one model in the product's order, for tests that differ in the model alone."""

from __future__ import annotations

from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.check import check_replays


def checked(model, examples, backend, *, call_for=None, seed=1, after_capture=lambda: None):
    """What the check finds at each batch size; ``call_for`` gives the compiled code of a batch size."""
    with backend.pool() as pool:
        captures = capture_batches(call_for or (lambda _: model), examples, pool, model=model, backend=backend)
        assert captures.refused is None, captures.refused
        after_capture()
        return check_replays(
            captures.graphs,
            lambda _: model,
            examples,
            model=model,
            backend=backend,
            seed=seed,
            captured_at=captures.addresses,
            size_states=captures.size_states,
            **({} if call_for is None else {"captured_for": call_for}),
        )

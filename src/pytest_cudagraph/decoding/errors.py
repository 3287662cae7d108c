"""The exceptions of decoding, one for each of its gates. Each is a failed test."""

from __future__ import annotations

from pytest_cudagraph.errors import GraphTestFailure


class StepNotReplayed(GraphTestFailure):
    """A decode step of a generation ran without its graph."""


class TokenMismatch(GraphTestFailure):
    """Tokens that captured steps generate differ from eager's. No timing is shown or saved."""


class LogitsNotFinite(GraphTestFailure):
    """The decoder's own logits, without a graph, are not numbers that can be compared."""


class TooManyBytes(GraphTestFailure):
    """A prefill in chunks takes more bytes than the test allows."""


class TooFewTokensPerStep(GraphTestFailure):
    """Prompt lookup gives fewer tokens per step than the test asks for."""


class TokenNotAllowed(GraphTestFailure):
    """A guided generation chose a token that the mask of its step does not allow."""


class InvalidOutput(GraphTestFailure):
    """Fewer outputs of a guided generation are valid than the test asks for."""


class TooMuchOverhead(GraphTestFailure):
    """A guided step takes, with confidence, more time over a greedy one than the test allows."""


class EngineFailed(GraphTestFailure):
    """An engine does not load, does not generate, or dies in one of its modes."""


class FellBackToEager(GraphTestFailure):
    """An engine runs without its graphs, by its own error or by its own count."""


FAILURES: dict[str, type[GraphTestFailure]] = {
    "steps": StepNotReplayed,
    "tokens": TokenMismatch,
    "finite": LogitsNotFinite,
    "bytes": TooManyBytes,
    "lookup": TooFewTokensPerStep,
    "mask": TokenNotAllowed,
    "validity": InvalidOutput,
    "overhead": TooMuchOverhead,
    "engine": EngineFailed,
    "errors": EngineFailed,
    "fallback": FellBackToEager,
}
"""By the name of the gate. The public names of the classes are in the package itself."""

for _failure in FAILURES.values():
    _failure.__module__ = "pytest_cudagraph"

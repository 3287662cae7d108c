"""Audit the eager model: find what prevents a capture, and what makes a replay wrong without an error."""

from pytest_cudagraph.audit.eager_audit import Audit, audit, with_accepted

"""Audit the eager model: what would refuse a capture, and what would make a replay wrong without a word."""

from pytest_cudagraph.audit.eager_audit import Audit, audit

__all__ = ["Audit", "audit"]

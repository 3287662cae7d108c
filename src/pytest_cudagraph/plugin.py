"""The pytest hooks."""

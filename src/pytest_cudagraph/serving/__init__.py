"""Serves models without pytest: ``GraphRunner``, and the drop-in compiler for pipelines."""

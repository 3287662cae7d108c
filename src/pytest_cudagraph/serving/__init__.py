"""What serving code uses without pytest: ``GraphRunner``, and the drop-in compiler for pipelines."""

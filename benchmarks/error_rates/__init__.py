"""What ``benchmarks/gate_error_rates.py`` simulates, piece by piece. Needs numpy, scipy and pytest-benchmark."""

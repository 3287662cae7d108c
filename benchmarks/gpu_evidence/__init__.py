"""What ``benchmarks/gpu.py`` measures, piece by piece. Needs torch, numpy, transformers and this source tree."""

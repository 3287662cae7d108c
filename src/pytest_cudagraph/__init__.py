"""CUDA graph performance regressions as ordinary pytest failures."""

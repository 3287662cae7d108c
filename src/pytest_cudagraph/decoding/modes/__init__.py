"""Eager against graphs: one engine, one process per mode. The interface of an engine, and adapters.

Nothing here imports torch. The process of a mode is :mod:`pytest_cudagraph.decoding.modes.mode_process`.
"""

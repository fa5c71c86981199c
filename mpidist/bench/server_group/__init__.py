"""Benchmarks of parameter servers: uneven steps, and sweeps over sizes, workers and servers.

These benchmarks have a folder of their own because a folder has at most 14 files.
"""

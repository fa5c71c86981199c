"""Benchmarks of parameter servers: uneven steps, and sweeps over sizes, workers and servers.

They have a folder of their own because a folder has at most 14 files.
"""

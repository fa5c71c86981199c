"""Benchmarks for a user's own cluster. Each alternates with the reference it is compared to.

A file is one measurement; `interleave`, `ratios` and `report` are what all of them need. The
commands are in `cli/bench/`.
"""

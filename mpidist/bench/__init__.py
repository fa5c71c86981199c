"""Benchmarks for a user's own cluster. Each times mpidist and a reference in the same run.

Each file contains one benchmark, except that `bench_folder`, `interleave`, `ratios`, `report` and
`torch_yardstick` contain functions that the benchmarks use. The commands that run the benchmarks
are in `cli/bench/`.
"""

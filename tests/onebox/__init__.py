"""Clusters on one machine, for tests and benchmarks: a real Slurm, and a network of known speed."""

"""Clusters on one machine: a real Slurm, and a network of known speed, for tests and benchmarks."""

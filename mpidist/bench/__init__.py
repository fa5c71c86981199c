"""Benchmarks for a user's own cluster. Each times mpidist and a reference in the same run."""

"""Benchmarks for a user's own cluster. Each measures mpidist and a reference in the same run."""

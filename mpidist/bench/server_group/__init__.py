"""Benchmarks of parameter servers: uneven steps, and many sizes, workers and servers."""

"""Benchmarks that need root, network namespaces or killed jobs; each has a make target."""

"""Benchmarks that need a lab: root, namespaces, killed jobs. Each has a make target."""

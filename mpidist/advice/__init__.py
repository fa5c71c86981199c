"""Advice for a cluster: faster settings of MPI, and why `auto` chose its algorithms."""

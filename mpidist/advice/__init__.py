"""Advice for a cluster: faster settings of MPI, and the reasons for the algorithms of `auto`."""

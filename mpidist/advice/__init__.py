"""Advice for a cluster: settings that make MPI faster, and why "auto" chooses an algorithm."""

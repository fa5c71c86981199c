"""Fault tolerance: save before a job ends, and find hangs, slow ranks and unequal replicas."""

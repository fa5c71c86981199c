"""Fault tolerance: save in time, and find hangs, slow ranks and unequal replicas."""

"""Consistency modes besides BSP, SSP and ASP, changes of the mode, and stale gradients.

A stale gradient is one that a worker has computed from old parameters.
"""

"""Estimate the time that allreduce schedules would take on a modelled network, without MPI.

A schedule is the list of steps (send, receive, add) of each rank. `predict` returns the time of an
algorithm for any number of ranks, up to a hundred thousand.
"""

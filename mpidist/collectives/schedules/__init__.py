"""The collective algorithms, as functions that return the list of steps of each rank.

The modules of this package make no MPI calls. The docstring of an algorithm's module gives its
cost.
"""

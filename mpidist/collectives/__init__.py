"""The collectives: most algorithms are lists of steps, which one executor runs on every rank.

The folder ``schedules/`` contains the algorithms, and ``engines/`` contains the code that runs
them. For ``algorithm="auto"``, the module `selection` measures which algorithm is the fastest.
"""

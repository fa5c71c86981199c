"""The collective algorithms, as functions that return the list of steps of each rank.

The modules of this package make no MPI calls. The module `schedule` defines the steps, `check`
verifies lists of steps, and `algorithms` maps the names of the algorithms to their functions.
`protocol_limits` has measured message lengths: at some of these lengths MPI changes its protocol,
and at others another schedule becomes faster. Each other module contains one family of algorithms,
and most module docstrings have a picture for a few ranks.
"""

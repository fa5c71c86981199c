"""The collective algorithms, as functions that return the list of steps of each rank.

The modules of this package make no MPI calls. The module `schedule` defines the steps, `check`
verifies lists of steps, and `algorithms` maps the names of the algorithms to their functions.
`protocol_limits` has the measured lengths at which MPI changes its protocol, or another schedule is
faster. Each other module contains one family of algorithms, and most docstrings draw them for a few
ranks.
"""

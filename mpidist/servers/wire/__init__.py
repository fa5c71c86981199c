"""The messages of pushes, pulls and answers: in pieces, as short messages, or in shared memory.

A worker sends large gradients to a server in pieces. Under BSP the server answers each piece as
soon as it has updated the parameters of this piece, so gradients and answers travel at the same
time.
"""

"""The messages of pushes, pulls and answers: in pieces, as short messages, or in shared memory.

A worker sends a large push to a server in pieces. Under BSP the server answers each piece as soon
as it has updated the parameters of this piece. So pushes and answers travel at the same time, and
neither the worker nor the server needs memory for a whole message. `wire_pieces` says what a piece
is; it uses no MPI.
"""

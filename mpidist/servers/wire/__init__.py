"""A push and its answer in pieces: what a piece is, how many may be on the way, and both ends.

A worker sends a large push to a server in pieces, and the server answers each piece as soon as it
has updated it. So pushes and answers travel at the same time, and neither end needs memory for a
whole message. `wire_pieces` uses no MPI.
"""

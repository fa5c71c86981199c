"""Long messages that travel in pieces, but that the server handles as whole messages.

A push is collected until all its pieces have arrived, and all pieces of an answer have parameters
of the same version. `piece_transfers` sends and receives pieces. The folder `wire` uses these
classes.
"""

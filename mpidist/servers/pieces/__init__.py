"""Long messages that travel in pieces, but that the server handles as whole messages.

A server collects the pieces of a push, and handles the push when all of them have arrived. All
pieces of an answer have parameters of the same version. `piece_transfers` sends and receives
pieces. The folder `wire` uses these classes.
"""

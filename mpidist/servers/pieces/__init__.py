"""Long messages that travel in pieces, but that the server handles as whole messages.

A server handles a push when all its pieces have arrived. All pieces of an answer have parameters of
the same version.
"""

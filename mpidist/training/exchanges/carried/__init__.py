"""The state that elastic runs with parameter servers keep when a rank dies.

The run then goes on with a new communicator of the living ranks.
"""

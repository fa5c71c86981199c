"""Change the shares of the servers during training, as the user asks or by their measured load.

A share is the fraction of each model that a server holds.
"""

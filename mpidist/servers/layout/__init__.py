"""The layout of a model: which server holds which part, and how messages list parts.

This folder also chooses the ranks of servers and workers, and checks the memory of the servers.
"""

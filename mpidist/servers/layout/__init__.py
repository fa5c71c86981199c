"""The layout of a model: which server holds which part, and how messages list parts.

This folder also chooses which ranks are servers and workers, and checks that the servers have
enough memory.
"""

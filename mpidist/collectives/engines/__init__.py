"""Engines: objects that run reductions by messages, by MPI's own calls, or in shared memory.

The module `programs` chooses the engine for the name of an algorithm.
"""

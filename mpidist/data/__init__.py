"""Data sources, and the order in which a run goes through them.

Nothing here knows about MPI: every rank holds the same `Sampler` and takes its own part.
"""

from mpidist.data.sampler import Position, Sampler

__all__ = ["Position", "Sampler"]

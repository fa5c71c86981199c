"""Elasticity: after a rank has died, a job goes on with the ranks that still live.

The living ranks make a smaller communicator, copy the newest state to ranks that have done fewer
steps, and repeat the interrupted step. The ranks of a node also evict (kill) a rank that is
stopped, hangs or is late, so that the others can go on without it.
"""

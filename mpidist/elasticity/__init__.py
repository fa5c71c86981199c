"""Elasticity: after a rank has died, a job goes on with the ranks that still live.

`elastic_loop` has `md.elastic` and `md.run_elastic`, for the user's own loops. `elastic_group` has
the class `Group` of the living ranks. A group notices a death, makes a smaller communicator, gives
all ranks the newest state, and repeats the interrupted step. `peer_state` sends the newest state to
ranks that have done fewer steps. `repair_deadline` ends a rank that cannot go on. The ranks of a
node watch each other (`node_watch`) by records in shared memory (`node_board`), and kill a rank
that is stopped, hangs or is late (`evict`, `deadline`). Killing a rank on purpose, so that the
others can go on without it, is called evicting it. `slow_ranks` evicts slow ranks, and
`evict_on_exception` evicts ranks on which the user's code raises an exception. `ulfm_trial` tests
before the start of a job whether ranks can survive a death. The MPI calls for all this (of ULFM,
MPI's extension for dead ranks) are in `runtime/ulfm.py`.
"""

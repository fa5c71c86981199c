"""Elasticity: a job goes on after a rank has died, with the ranks that live.

`elastic_loop` has the functions for loops of the user's own. `elastic_group` has the group in which
a program trains: it notices a death, makes a smaller communicator, brings all ranks to the newest
state, and repeats the interrupted step. `peer_state` sends the state from a rank that has it to the
ranks that are behind. `repair_deadline` ends a rank that cannot go on. The ranks of a node watch
each other (`node_watch`) on a board in memory (`node_board`), and kill a rank that is stopped,
hangs, or is late (`evict`, `deadline`). `slow_ranks` evicts slow ranks, and `evict_on_exception`
evicts ranks on which the user's own code raises an exception. `ulfm_trial` tests before a start
whether ranks can survive a death. The calls of MPI that all this needs are in `runtime/ulfm.py`.
"""

"""Elasticity: a job goes on after a rank has died, with the ranks that live.

`elastic_loop` has the functions for loops of the user's own. `elastic_group` has the group in which
a program trains: it notices a death, makes a smaller communicator, brings all ranks to the newest
state, and repeats the step that was broken off. `peer_state` sends the state from a rank that has
it to the ranks that are behind. `repair_deadline` ends a rank that cannot go on. The ranks of a
node watch each other (`node_watch`) on a board in memory (`node_board`), decide who is stopped,
hangs or is late after a `deadline`, and kill that rank (`evict`); `slow_ranks` evicts slow ranks,
and `own_errors` those whose own code raises. `ulfm_trial` tries before a start whether ranks can
survive. The calls of MPI on which this rests are in `runtime/ulfm.py`.
"""

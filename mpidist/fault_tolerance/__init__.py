"""Fault tolerance of a training loop: save in time, and find hangs, slow ranks, unequal replicas.

`guard` saves a checkpoint and ends the run when a signal arrives or the time is nearly over.
`watch` finds a hang, `hang` decides which rank is the cause, and `hang_dump` writes the last
operations of each rank. `stragglers` names slow ranks. `check_replicas` compares the bytes of
replicas. `hand_over` gives the run to an attempt with more ranks.
"""

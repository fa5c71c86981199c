"""Fault tolerance of a training loop: save in time, and find hangs, slow ranks, unequal replicas.

`guard` saves a checkpoint and ends the run when a signal arrives or the time limit is near. `watch`
finds a hang, `hang` decides which ranks may be the cause, and `hang_dump` writes the last
operations of each rank. `stragglers` finds slow ranks. `check_replicas` checks that all ranks have
the same parameters. `hand_over` passes a training run on to a new start of the job with more ranks.
"""

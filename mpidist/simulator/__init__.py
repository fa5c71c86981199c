"""Estimate the time that allreduce schedules would take on a modelled network, without MPI.

The module `network_model` defines the costs of messages, of additions and of each allreduce call.
The module `simulate` simulates a schedule (the list of steps of each rank) step by step. The module
`predict` returns the cost of an algorithm for any number of ranks. For many ranks, up to a hundred
thousand, `predict` uses `rank_classes` and `vector_simulator`, which compute the times of similar
ranks at once.
"""

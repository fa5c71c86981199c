"""Schedules on a modelled network: how long they would take, without MPI.

`network_model` is the cost of a message, `simulate` plays a schedule step by step, `predict` gives
an algorithm's time for any number of ranks. `vector_simulator` and `rank_classes` do that for a
hundred thousand ranks. No MPI in here.
"""

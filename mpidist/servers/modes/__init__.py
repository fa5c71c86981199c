"""Consistency modes beyond BSP, SSP and ASP: a bound that moves (DSSP), and backup workers.

Each mode has a gate of its own: a pure state machine such as `consistency.ConsistencyGate`, which
the tests run with every order of events.
"""

"""Modes beyond BSP, SSP and ASP: a bound that moves, backup workers, policies for old gradients.

`dynamic_bound` and `backup_workers` have gates of their own: pure state machines such as
`consistency.ConsistencyGate`, which the tests run with every order of events. `stale_gradients` has
the policies for gradients that were computed from old parameters, and `push_record` what a server
notes about the pushes of each worker.
"""

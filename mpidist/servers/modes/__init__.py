"""Further consistency modes than BSP, SSP and ASP, changes of the mode, and stale gradients.

`dynamic_bound` and `backup_workers` have gates of their own. A gate is a state machine without MPI
that decides when a server applies pushes and answers pulls, such as `consistency.ConsistencyGate`.
The tests run gates with every order of events. `stale_gradients` has the policies for gradients
that were computed from old parameters. `push_record` records facts about the pushes of each worker
on a server.
"""

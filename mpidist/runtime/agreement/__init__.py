"""An error on one rank reaches all ranks: calls, their signatures, and work on all ranks.

`calls` guards one call on one rank. `statuses` tells the ranks where the others stand, `mismatch`
says in words how two of them differ, `crossed_waits` finds ranks that wait for each other on two
communicators. `run_on_all` does local work that succeeds on all ranks or raises on all.
"""

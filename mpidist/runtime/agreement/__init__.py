"""What one rank does wrong is heard by all: calls, their signatures, and local work in common.

`calls` guards one call on one rank. `statuses` tells the ranks where the others stand, `mismatch`
says in words how two of them differ, `crossed_waits` finds ranks that wait for each other on two
communicators. `run_on_all` does local work that succeeds on all ranks or raises on all.
"""

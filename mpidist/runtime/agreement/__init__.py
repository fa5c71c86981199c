"""Agreement of ranks: an error on one rank is raised on all ranks of the communicator.

`calls` sends an exception that one rank raises in a public function to the other ranks. `statuses`
sends messages that tell other ranks in which operation a rank waits. `mismatch` compares the
statuses of ranks and composes the text of a `MismatchError`. `crossed_waits` finds ranks that wait
for each other on two communicators. `run_on_all` runs local work, which either succeeds on all
ranks or raises an error on all ranks.
"""

"""What every communicator of ours has: its context, its waits, its end, and agreement of its ranks.

`context` is the state of one communicator and `polling` how everything here waits. `topology` and
`arena` are the shape of the job and memory that all ranks lay out alike. `failure` ends a job with
the reason; `agreement/` sees to it that what one rank does wrong is heard by all.
"""

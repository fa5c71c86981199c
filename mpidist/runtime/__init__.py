"""What mpidist keeps for a communicator: context, waits, its end, and agreement of ranks.

`context` is the state of one communicator and `polling` how everything here waits. `topology` and
`arena` are the shape of the job and memory that all ranks lay out alike. `failure` ends a job with
the reason; `agreement/` makes an error on one rank reach all ranks.
"""

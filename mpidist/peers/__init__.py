"""Ranks that train models of their own, and average them with a few peers every few steps.

`peer_plan` says who averages with whom in each round, and proves that the graph connects all ranks
and keeps the mean. `round_gate` says when a rank may go on with its steps. Both need no MPI.
`peer_messages` and `async_messages` carry a plan out, and `mixed_arrays` computes the averages.
`md.PeerAverage` uses them in `md.train`.
"""

"""Each rank trains a model of its own, and averages it with a few other ranks every few steps.

`peer_plan` says which ranks average with each other in each round. It checks that the plan connects
all ranks and that a round does not change the mean of all models. `round_gate` says when a rank has
received enough models to end a round. `peer_plan` and `round_gate` need no MPI. `peer_messages` and
`async_messages` send the models, and `mixed_arrays` computes the averages. The strategy
`md.PeerAverage` of `md.train` uses these modules.
"""
